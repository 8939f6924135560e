"""Which ranks publish what, and the memory of their copies."""

from collections.abc import Iterator

from configs.model_facts import BYTES, facts_of
from configs.schema import Config

COPIES_SHARE = 0.9
"""The rest of a GPU is for CUDA and NCCL."""

GROUP_BYTES = 700 << 20
"""NCCL takes this on a server's worker for each further rank that sends. Measured: 544 to 688 MB."""


def shards_of(config: Config) -> int:
    """Ranks that share a copy of the model."""
    return config.learner.shard or max(1, config.learner.ranks // config.learner.nodes)


def publishes_rows(config: Config, shards: int) -> bool:
    """Whether each rank sends its own rows; else rank 0 sends everything.

    `auto` takes rows if rank 0 then saves more bytes than a server's worker needs for the groups of further ranks.
    Files may hold weights in another form, which cannot be sent by rows.
    """
    if not _may_publish_rows(config, shards):
        return False
    return config.weights.publish == "rows" or _saved(config, shards) > (shards - 1) * GROUP_BYTES


def _plain(config: Config) -> bool:
    facts = facts_of(config.model)
    return facts.proven and facts.image_token is None and not facts.text_alone


def _saved(config: Config, shards: int) -> int:
    sent = facts_of(config.model).sent_bytes(config.model)
    return sent - sent // shards


def _may_publish_rows(config: Config, shards: int) -> bool:
    wanted = config.weights.publish == "rows" or (config.weights.publish == "auto" and _plain(config))
    return shards > 1 and wanted and not _rank_0_alone(config, shards)


def choice(config: Config, shards: int) -> str:
    """What `weights.publish: auto` takes, and why; "" if it is not `auto`."""
    if config.weights.publish != "auto":
        return ""
    if publishes_rows(config, shards):
        return f"weights.publish: auto takes rows: each of {shards} ranks holds its share of the copies for the servers"
    why = "one rank has the whole model" if shards == 1 else _rank_0_alone(config, shards)
    if not why and facts_of(config.model).parameters is None:
        why = f"no weights of {config.model.path} are here, so its size is not known"
        why += "; set rows for a Llama, Qwen2, Qwen3 or Qwen3-MoE"
    if not why and not _plain(config):
        why = "the model's files may hold weights in another form"
    return f"weights.publish: auto takes gather: {why or 'the copies are small'}"


def _rank_0_alone(config: Config, shards: int) -> str:
    """Why no other rank could send; "" if they can."""
    weights, learner = config.weights, config.learner
    if weights.transport != "broadcast":
        return f"weights.transport is {weights.transport}, which rank 0 writes"
    if shards > learner.ranks // learner.nodes and is_loopback(weights.host):
        return f"weights.host {weights.host} is loopback, and a copy of the model lies over ranks of several nodes"
    return ""


def copies_over(config: Config, shards: int, rank: int) -> int:
    """Over how many ranks the two copies are spread of which `rank` holds a share; 0: it holds none."""
    if config.sft.rows is not None:
        return 0
    if publishes_rows(config, shards):
        return shards if rank < shards else 0
    return int(rank == 0)


def copies(config: Config) -> tuple[int, str]:
    """Bytes of the copies on a rank that holds some, and which rank."""
    sent, shards = facts_of(config.model).sent_bytes(config.model), shards_of(config)
    if publishes_rows(config, shards):
        return -(-sent // shards), f"each of {shards} learner ranks"
    return sent, "learner rank 0"


def most_parameters(config: Config, gpu_bytes: int) -> int:
    shards = shards_of(config)
    over = shards if _may_publish_rows(config, shards) else 1
    return int(COPIES_SHARE * gpu_bytes) * over // (2 * BYTES[config.model.dtype])


def unpublishable(config: Config, gpu_bytes: int | None) -> Iterator[str]:
    sent, who = copies(config)
    if gpu_bytes and config.learner.device != "cpu" and sent > COPIES_SHARE * gpu_bytes:
        needed = f"{who} holds {held(config)} for the servers, {sent / 2**30:,.1f} GiB"
        has = f"but a GPU has {gpu_bytes / 2**30:,.1f} GiB"
        yield f"model.path: {config.model.path}: {needed}, {has}; {remedy(config, shards_of(config))}"


def held(config: Config) -> str:
    rows = publishes_rows(config, shards_of(config))
    return "two copies of its rows of trained weights" if rows else "two copies of trained weights"


def remedy(config: Config, shards: int) -> str:
    smaller = "train an adapter (model.lora), take a smaller model, or GPUs with more memory"
    if publishes_rows(config, shards):
        return f"raise learner.ranks or learner.shard, {smaller}"
    if _rank_0_alone(config, shards):
        return smaller
    more = "set weights.publish: rows" if shards > 1 else "raise learner.ranks"
    return f"{more}, with which each rank holds its share, {smaller}"


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's own; no name is looked up."""
    return host in ("localhost", "[::1]", "::1") or host.startswith("127.")


def contradictions(config: Config) -> Iterator[str]:
    why = _rank_0_alone(config, shards_of(config))
    if config.weights.publish == "rows" and why:
        yield f"weights.publish: rows, but {why}; change that, or leave weights.publish out"
