"""States the arithmetic of a run in words, and refuses contradictions: what `python -m configs RUN.yaml` prints.

`explain` never fails and touches nothing but the model's folder; lines that begin with `note:` say what makes the run
slow or odd. What makes it impossible is refused by `check`. Run by hand, and by the launcher before it starts anything.
"""

from collections.abc import Iterator

from configs.checks import FILES, TOKEN_BYTES, check, longest, loopback
from configs.model_facts import model_facts
from configs.schema import Config

__all__ = ["FILES", "check", "explain"]


def explain(config: Config, problems: int | None = None) -> list[str]:
    """The run in lines for people; `problems` is the number of rows in data.train, where known."""
    return [
        *_batch(config), *_data(config, problems), *_staleness(config), *_machines(config), *_disk(config),
        *(f"note: {line}" for line in _notes(config, problems)),
    ]  # fmt: skip


def open_groups(config: Config) -> int:
    """How many groups may be leased or stored at once: admission lets (staleness + 1) batches be open."""
    return (_staleness_held(config) + 1) * config.batch.groups


def in_flight(config: Config) -> int:
    """How many groups all servers together generate at once, if admission lets them."""
    return config.rollout.servers * config.rollout.groups_in_flight


def _staleness_held(config: Config) -> int:
    target = config.batch.target_staleness
    return config.batch.max_staleness if target is None else target


def _batch(config: Config) -> Iterator[str]:
    batch, prompt, answer = config.batch, config.data.max_prompt_tokens, config.sampling.max_tokens
    samples = batch.groups * batch.samples
    yield (
        f"run {config.run.name}: {config.run.versions:,} versions (optimizer steps) of {config.model.path}, into "
        f"{config.run.path}"
    )
    yield (
        f"batch: {batch.groups:,} groups x {batch.samples} samples = {samples:,} samples; at most "
        f"{samples * (prompt + answer):,} tokens "
        f"({prompt:,} of prompt + {answer:,} of answer each), {samples * answer:,} of them sampled"
    )


def _data(config: Config, problems: int | None) -> Iterator[str]:
    groups, needed = config.batch.groups, config.run.versions * config.batch.groups
    if not problems:
        yield f"data: the run trains {needed:,} groups, one problem each"
        return
    order = "shuffled anew each" if config.data.shuffle else "in the order of the file"
    yield (
        f"data: {problems:,} problems make {problems / groups:,.1f} batches an epoch; the run trains {needed:,} groups "
        "= "
        f"{needed / problems:,.2f} epochs, {order}"
    )


def _staleness(config: Config) -> Iterator[str]:
    groups, held, flying = config.batch.groups, _staleness_held(config), in_flight(config)
    yield (
        f"staleness: no group older than {config.batch.max_staleness} versions is trained; ({held} + 1) x {groups} = "
        f"{open_groups(config):,} groups may be open at once, generating or stored"
    )
    busy = min(flying, open_groups(config))
    yield (
        f"servers: {config.rollout.servers} x {config.rollout.groups_in_flight} = {flying:,} groups "
        f"({flying * config.batch.samples:,} sequences) in flight, {busy:,} of them admitted"
    )
    usual = min(float(held), busy / groups)
    yield (
        f"mean age to expect: about {usual:.1f} versions while the servers are the slower side, up to {held} when the "
        "learner is"
    )


def _machines(config: Config) -> Iterator[str]:
    learner, rollout = config.learner, config.rollout
    ranks, serving = learner.ranks, rollout.servers * rollout.tensor_parallel
    on_gpu = (ranks if learner.device != "cpu" else 0) + (serving if rollout.device != "cpu" else 0)
    parts = f"learner {ranks} rank{'s' * (ranks > 1)} + {rollout.servers} server{'s' * (rollout.servers > 1)}"
    if on_gpu == ranks + serving:
        maybe = "" if learner.device == rollout.device == "cuda" else ", or the CPU where there is none"
        yield f"GPUs: {parts} x tensor parallel {rollout.tensor_parallel} = {on_gpu}{maybe}"
    else:
        yield f"GPUs: {on_gpu}; {parts}, learner on {learner.device}, servers on {rollout.device}"
    samples = config.batch.groups * config.batch.samples / ranks
    budget = learner.tokens_per_microbatch
    cut = "as many as fit its memory"
    if budget != "auto":
        fit = max(1, budget // longest(config))
        cut = f"{_up(samples, fit):,} of {budget:,} tokens if all are as long as may be"
    yield f"microbatches: a rank trains about {samples:,.0f} of a version's samples, packed into forward passes, {cut}"


def checkpoint_bytes(config: Config) -> int | None:
    """Disk that the checkpoints of a run fill, one being written included; None for a model that is not in a folder."""
    parameters = model_facts(config.model.path).parameters
    return None if parameters is None else parameters * (_kept(config) * _state(config) + _export(config))


def _kept(config: Config) -> int:
    """Checkpoints on disk at once, one being written among them, at worst."""
    learner, versions = config.learner, config.run.versions
    every = versions // learner.keep_every if learner.keep_every else 0
    written = _up(versions, learner.checkpoint_every) + every
    return min(learner.keep_checkpoints + learner.keep_best + every + 1, written)


def _state(config: Config) -> int:
    """Bytes of a parameter in a checkpoint: float32 weight and two moments; an export with each one at worst."""
    return 12 + (_export(config) if config.learner.export_every else 0)


def _export(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def _disk(config: Config) -> Iterator[str]:
    learner, parameters, disk = config.learner, model_facts(config.model.path).parameters, checkpoint_bytes(config)
    total = f"{_state(config)} bytes a parameter and checkpoint"
    if parameters and disk:
        each = f"({_kept(config)} x {_state(config)} + {_export(config)} bytes)"
        total = f"{_giga(parameters)} parameters x {each} = {_giga(disk)}B of disk"
    yield (
        f"checkpoints: every {learner.checkpoint_every} versions, "
        f"{_kept(config)} on disk at once, one being written among them: {total}"
    )
    batch = config.batch.groups * config.batch.samples * longest(config) * TOKEN_BYTES / 2**30
    yield (
        f"buffer: a batch takes at most {batch:.3g} GiB of the {config.buffer.max_gib:g} GiB that may be stored "
        "untrained"
    )


def _notes(config: Config, problems: int | None) -> Iterator[str]:
    yield from _notes_on_flow(config, problems)
    yield from _notes_on_learning(config)
    yield from _notes_on_places(config)


def _notes_on_flow(config: Config, problems: int | None) -> Iterator[str]:
    flying, may = in_flight(config), open_groups(config)
    if _staleness_held(config) == 0:
        yield (
            "staleness 0 is synchronous: the servers wait while the learner trains, and the learner while they generate"
        )
    if flying > may:
        yield (
            f"servers have room for {flying:,} groups but only {may:,} may be open: the rest stays idle; raise "
            "batch.max_staleness "
            f"or batch.groups, or lower rollout.groups_in_flight to {max(1, may // config.rollout.servers)}"
        )
    if problems and problems < config.batch.groups:
        yield (
            f"{problems:,} problems are fewer than batch.groups {config.batch.groups:,}: a batch has the same problem "
            "more than once"
        )


def _notes_on_learning(config: Config) -> Iterator[str]:
    algorithm, learner, versions = config.algorithm, config.learner, config.run.versions
    if algorithm.loss == "gspo" and max(algorithm.clip_low, algorithm.clip_high) > 0.01:
        yield (
            f"algorithm.loss gspo clips ratios of whole sequences: clip_low {algorithm.clip_low:g} and clip_high "
            f"{algorithm.clip_high:g} never bind; 3e-4 and 4e-4 are usual"
        )
    if learner.warmup_versions >= versions:
        yield (
            f"learner.warmup_versions {learner.warmup_versions} is not below run.versions {versions}: the learning "
            "rate never gets to lr"
        )
    if learner.checkpoint_every > versions:
        yield (
            f"learner.checkpoint_every {learner.checkpoint_every} is more than run.versions {versions}: only the last "
            "one is kept"
        )
    if algorithm.reference_kl > 0:
        yield "algorithm.reference_kl keeps a frozen copy of the model and costs one more forward pass"
    if algorithm.loss == "m2po":
        yield "algorithm.loss m2po costs one more forward pass: its budget is of the whole batch"


def _notes_on_places(config: Config) -> Iterator[str]:
    host = config.buffer.address.removeprefix("tcp://").rpartition(":")[0]
    if not loopback(host) and loopback(config.weights.host):
        yield (
            f"weights.host {config.weights.host} is loopback: servers on other machines cannot fetch policies; name an "
            "interface"
        )
    if config.buffer.path is None:
        yield "buffer.path null: stored groups are lost if the buffer's process dies"
    batch, limit = config.batch, config.buffer.max_message_mib
    part = batch.groups * batch.samples * longest(config) * TOKEN_BYTES / config.learner.ranks / 2**20
    if part > limit:
        yield (
            f"a rank's part of a batch can take {part:,.0f} MiB, above buffer.max_message_mib {limit}; raise it if "
            "answers get that long"
        )


def _up(amount: float, size: int) -> int:
    """How many of `size` it takes for `amount`."""
    return int(-(-amount // size))


def _giga(amount: float) -> str:
    """`amount` with a decimal prefix: 1543714304 -> `1.5 G`."""
    for prefix in ("", "k", "M", "G"):
        if amount < 1000:
            return f"{amount:.3g} {prefix}"
        amount /= 1000
    return f"{amount:.3g} T"
