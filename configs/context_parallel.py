"""What `learner.context_parallel` must satisfy by the run file and config.json. `learner/model/context.py` asks
`why_not` again for every layer."""

from collections.abc import Iterator

from configs.model_facts import facts_of
from configs.publishing import shards_of
from configs.schema import Config, LearnerConfig

REMEDY = "set it to a number that does, or to 1"


def parts_of(learner: LearnerConfig) -> int:
    """Parts of a batch: one for each group of ranks that share rows."""
    return max(1, learner.ranks // learner.context_parallel)


def contradictions(config: Config) -> Iterator[str]:
    size, shards, facts = config.learner.context_parallel, shards_of(config), facts_of(config.model)
    if size == 1:
        return
    key = f"learner.context_parallel: {size}"
    if config.sft.rows is not None:
        yield f"{key}, but supervised fine-tuning trains each row on one rank; set it to 1"
    if shards % size:
        ranks = f"learner.shard {shards}" if config.learner.shard else f"the {shards} learner.ranks of a node"
        yield f"{key} does not divide {ranks}; {REMEDY}"
    if facts.tower:
        yield f"{key}, but {config.model.path} reads images, whose tokens are not split over ranks; set it to 1"
    if problem := why_not(*facts.queries_and_keys, size):
        yield f"learner.context_parallel: {problem} of {config.model.path}; {REMEDY}"


def why_not(queries: int, keys: int, size: int) -> str:
    """Why `size` ranks cannot share the heads; "" if they can. vLLM has the same rule for the GPUs of a server."""
    if queries % size:
        return f"{size} does not divide the {queries} attention heads"
    if keys % size and size % keys:
        return f"{size} is neither a divisor nor a multiple of the {keys} heads of keys and values"
    return ""
