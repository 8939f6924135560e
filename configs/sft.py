"""What a run file of supervised fine-tuning must satisfy.

Keys of reinforcement learning are refused: whoever writes one expects an effect.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from configs.data.sources import Source, SourceError, generated, parts_of, source_name
from configs.model_facts import facts_of
from configs.schema import NO_REWARD, Config

LOCK = "sft.lock"
"""The training process holds this file in the run's folder."""
WITHOUT = ("reward", "teacher", "sampling", "batch", "algorithm", "rollout", "weights", "buffer", "cluster")
READ_HERE = ("rollout.chat.template_kwargs", "rollout.chat.thinking")
UNREAD = (
    *("data.demonstrations", "data.max_prompt_tokens"),
    *("learner.share_prompts", "eval.share", "eval.keep_samples", "log.servers_every_s"),
)
IMAGE_KEYS = ("image_dir", "min_pixels", "max_pixels", "max_images")
"""Keys of the section `data` that are for images."""
UNREAD_OF_SETS = ("samples", "k", "temperature", "max_tokens")
LONGEST = 32768
"""For a model whose positions are not known."""


def rules(config: Config, rows: int | None = None) -> Iterator[str]:
    """Yield what is wrong. `rows`: of data.train, if known."""
    batch, ranks = config.sft.rows, config.learner.ranks
    if batch is None:
        yield "sft.rows: null; set it to the rows of a batch, e.g. sft.rows: 32, and let data.train name demonstrations"
        return
    if batch < ranks:
        yield f"learner.ranks: {ranks} is more than sft.rows {batch}, a rank would get nothing; raise sft.rows"
    yield from _unread(config)
    yield from _lengths(config)
    yield from _sources(config)
    if config.eval.every is not None and not config.data.eval:
        yield f"eval.every: {config.eval.every}, but data.eval names no rows; name some or set eval.every: null"
    if config.learner.keep_best and not config.data.eval:
        problem = f"learner.keep_best: {config.learner.keep_best} keeps checkpoints by their held-out loss"
        yield f"{problem}, and data.eval names no rows; name some or set learner.keep_best: 0"
    yield from _epochs(config, batch, rows)


def beside(config: Config) -> Iterator[str]:
    """Yield what is wrong with `data.demonstrations` in a run of reinforcement learning."""
    given, key = config.data.demonstrations, "data.demonstrations"
    if given is None:
        return
    if config.rollout.routing_replay:
        problem = "demonstrations have no routes, and rollout.routing_replay trains with those that servers took"
        yield f"{key}: {problem}; remove one of the keys"
    if config.learner.context_parallel > 1:
        problem = f"each rank trains its own, and learner.context_parallel is {config.learner.context_parallel}"
        yield f"{key}: {problem}; remove one of the keys"
    yield from _no_generated(f"{key}.path", given.path)


def longest(config: Config) -> int:
    wanted, budget = config.sft.max_tokens, config.learner.tokens_per_microbatch
    if wanted != "auto":
        return wanted
    limits = [facts_of(config.model).positions, None if budget == "auto" else budget]
    return min((limit for limit in limits if limit is not None), default=LONGEST)


def _unread(config: Config) -> Iterator[str]:
    given = config.model_dump(mode="json", exclude_defaults=True)
    for section in WITHOUT:
        for key in _leaves(given.get(section, {}), section):
            if not key.startswith(READ_HERE) and (key, config.reward.function) != ("reward.function", NO_REWARD):
                yield f"{key}: has no effect in supervised fine-tuning; remove the key"
    for key in UNREAD:
        section, name = key.split(".")
        if name in given.get(section, {}):
            yield f"{key}: has no effect in supervised fine-tuning; remove the key"
    facts = facts_of(config.model)
    for name in IMAGE_KEYS if facts.kind and facts.image_token is None else ():
        if name in given["data"]:
            yield f"data.{name}: has no effect, because {config.model.path} sees no images; remove the key"
    for name, held_out in config.data.eval.items():
        for key in UNREAD_OF_SETS:
            if key in held_out.model_dump(exclude_defaults=True):
                yield f"data.eval.{name}.{key}: has no effect in supervised fine-tuning; remove the key"


def _leaves(tree: Any, above: str) -> Iterator[str]:
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{above}.{name}")
    elif tree != {}:
        yield above


def _lengths(config: Config) -> Iterator[str]:
    wanted, budget = config.sft.max_tokens, config.learner.tokens_per_microbatch
    positions = facts_of(config.model).positions
    if wanted == "auto":
        return
    if budget != "auto" and budget < wanted:
        remedy = f"set it to {wanted} or more"
        yield f"learner.tokens_per_microbatch: {budget} is less than sft.max_tokens {wanted}; {remedy}"
    if positions is not None and positions < wanted:
        yield f"sft.max_tokens: {wanted} is more than the {positions} positions of {config.model.path}; lower it"


def _sources(config: Config) -> Iterator[str]:
    for key, source in config.data.sources().items():
        yield from _no_generated(f"data.{key}", source)


def _no_generated(key: str, source: Source) -> Iterator[str]:
    """Answers of generated sets are results without the way to them."""
    try:
        made = [part.path for part in parts_of(source) if generated(part.path)]
    except SourceError as error:
        yield f"{key}: {source_name(source)}: {error}"
        return
    for path in made:
        yield f"{key}: {path}: a generated set holds no demonstrations; write its rows to a file with answers"


def _epochs(config: Config, batch: int, rows: int | None) -> Iterator[str]:
    epochs, versions = config.data.epochs, config.run.versions
    if not rows or epochs is None or epochs * rows >= versions * batch:
        return
    problem = f"data.epochs: {epochs} x {rows} rows = {epochs * rows}"
    needed = f"run.versions {versions} x sft.rows {batch} = {versions * batch} rows"
    remedy = f"set data.epochs: {-(-versions * batch // rows)} (or null)"
    yield f"{problem}, but {needed}; {remedy} or run.versions: {max(1, epochs * rows // batch)}"
