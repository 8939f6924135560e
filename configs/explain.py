"""The arithmetic of a run in words. `explain` never fails and reads only the model's folder. Lines that begin with
`note:` say what makes the run slow or odd."""

from collections.abc import Iterator
from math import ceil, log10

from configs import staging
from configs.checks import TOP_BYTES, max_group_bytes, max_sample_tokens
from configs.context_parallel import parts_of
from configs.critic import STATE_BYTES, keeps_critic
from configs.data.sources import count_rows
from configs.flow.capacity import connections, memory_bytes, open_files
from configs.flow.difficulty import drawn_shares
from configs.flow.kv_room import KvRoom, kv_room
from configs.flow.sequences import MEAN_SHARE, admitted_staleness, mean_tokens, open_groups, places, share_of_batch
from configs.flow.simulation import LEARNER_SHARE, Flow, expected, most_running
from configs.matmul import lines as matmul_lines
from configs.model_facts import BYTES, checkpoint_bytes, facts_of
from configs.publishing import copies, is_loopback, most_parameters, unpublishable
from configs.schema import NO_REWARD, Config

NEARLY_FULL = 0.85
"""Share of places at which a server counts as full."""
MAX_NUM_SEQS = "rollout.engine.max_num_seqs"
MIXTURES = {
    "a third each is never, sometimes and always solved": {"unsolved": 1 / 3, "between": 1 / 3, "solved": 1 / 3},
    "70 % are never and 10 % always solved": {"unsolved": 0.7, "between": 0.2, "solved": 0.1},
    "10 % are never and 70 % always solved": {"unsolved": 0.1, "between": 0.2, "solved": 0.7},
}
USUAL_GPU_BYTES = 80 * 10**9
AS_FAST = 0.96
"""Simulations differ by as much."""


def explain(
    config: Config, problems: int | None = None, gpu_bytes: int | None = None, card: str = "as this machine's"
) -> list[str]:
    """`gpu_bytes`: memory of a GPU that serves, which `card` describes."""
    room = kv_room(config, gpu_bytes, card)
    most = most_running(config) if room.sequences is None else max(1, min(most_running(config), room.sequences))
    flow = expected(config, admitted_staleness(config), most)
    sizes = (line.removeprefix("model.path: ") for line in unpublishable(config, gpu_bytes or USUAL_GPU_BYTES))
    notes = (
        *sizes,
        *_notes_on_flow(config, problems, flow, most),
        *_notes_on_learning(config),
        *_notes_on_addresses(config),
    )
    return [
        *_batch(config), *_data(config, problems), *_demonstrations(config), *_difficulty(config, problems),
        *_images(config),
        *_flow(config, flow, most, room), *_machines(config), *matmul_lines(config),
        *_publishing(config, gpu_bytes or USUAL_GPU_BYTES), *staging.lines(config), *_disk(config),
        *_buffer(config, problems or 0), *(f"note: {line}" for line in notes),
    ]  # fmt: skip


def disk_bytes(config: Config) -> int | None:
    parameters = facts_of(config.model).saved_parameters(config.model)
    return None if parameters is None else parameters * (_kept(config) * _each(config) + _last_export(config))


def _batch(config: Config) -> Iterator[str]:
    run, batch = config.run, config.batch
    prompt, answer, samples = config.data.max_prompt_tokens, config.sampling.max_tokens, batch.groups * batch.samples
    yield f"run {run.name}: {run.versions:,} versions (optimizer steps) of {config.model.path}, into {run.path}"
    longest = max_sample_tokens(config)
    product = f"{batch.groups:,} groups x {batch.samples} samples = {samples:,} samples"
    each = f"({prompt:,} of prompt + {answer:,} of answer each), {samples * answer:,} of them sampled"
    if longest > prompt + answer:  # a task of several turns
        each = f"({longest:,} each: prompt, all turns and what the task gives)"
    yield f"batch: {product}; at most {samples * longest:,} tokens {each}"


def _data(config: Config, problems: int | None) -> Iterator[str]:
    groups, needed = config.batch.groups, config.run.versions * config.batch.groups
    if not problems:
        yield f"data: the run trains {needed:,} groups, one problem each"
        return
    order = "shuffled anew each" if config.data.shuffle else "in the order of the file"
    epochs = f"the run trains {needed:,} groups = {needed / problems:,.2f} epochs, {order}"
    yield f"data: {problems:,} problems make {problems / groups:,.1f} batches per epoch; {epochs}"


def _demonstrations(config: Config) -> Iterator[str]:
    given, samples = config.data.demonstrations, config.batch.groups * config.batch.samples
    if given is not None:
        rows = given.rows(samples)
        number = count_rows(given.path)
        epoch = f", each of {number:,} once in {number / rows:,.1f} versions" if number else ""
        each = f"{rows} beside the {samples} samples of a batch{epoch}"
        yield f"demonstrations: {each}; their loss is multiplied by {given.weight:g}"


def _difficulty(config: Config, problems: int | None) -> Iterator[str]:
    given, groups, versions = config.data.difficulty, config.batch.groups, config.run.versions
    if given is None:
        return
    total = sum(given.shares.values())
    each = ", ".join(f"{groups * share / total:.1f} {band}" for band, share in given.shares.items())
    rests = (
        f"a problem that was drawn rests for {given.rest} versions, one solved by all samples of {given.groups} groups"
    )
    yield f"difficulty: of {groups} groups drawn {each}; {rests} in a row for {given.return_after} more"
    if problems:
        what = []
        for words, mixture in MIXTURES.items():
            between = drawn_shares(given, problems, groups, versions, mixture)["between"]
            what.append(f"{between:.0%} instead of {mixture['between']:.0%} if {words}")
        to = f"over the run, of the groups of {problems:,} problems so many are of problems solved by some samples only"
        yield f"difficulty: {to}: {'; '.join(what)}"


def _images(config: Config) -> Iterator[str]:
    facts, frozen = facts_of(config.model), config.model.freeze
    if facts.idle:
        size = f"{_with_prefix(4 * facts.idle)}B of the learner's state, sent once to each server"
        what = f"{_with_prefix(facts.idle)} of the parameters are idle, such as a vision tower"
        yield f"text alone: {what}: frozen and never computed, {size}"
    if facts.tower is None:
        return
    most = config.data.max_pixels
    pixels = f"at most {most:,} pixels" if most else "as large as the model's processor lets it be"
    trained = f"of which model.freeze leaves out: {' and '.join(frozen)}" if frozen else "all of them trained"
    trained = "none of them trained with model.lora" if config.model.lora else trained
    of_server, kept = facts.tower * BYTES[config.model.dtype], 4 if "vision" in frozen else 16
    of_learner = of_server if config.model.lora else facts.tower * kept
    size = f"{_with_prefix(of_server)}B on each server and {_with_prefix(of_learner)}B of the learner's state"
    tower = f"its tower has {_with_prefix(facts.tower)} of the parameters, {trained}: {size}, besides its activations"
    budget = "a microbatch takes 2 patches for each token of its budget, 4 patches are a token"
    if facts.mutual:
        pixels, budget = "a square of the model's own size", budget.partition(",")[0]
    yield f"images: at most {config.data.max_images} a sample, each {pixels}; {tower}; {budget}"


def _flow(config: Config, flow: Flow, runs: int, room: KvRoom) -> Iterator[str]:
    rollout, staleness, each = config.rollout, admitted_staleness(config), places(config)
    most = rollout.most_servers * runs
    bound = f"no group older than {config.batch.max_staleness} versions is trained"
    product = f"({staleness} + 1) x {config.batch.groups} = {open_groups(config):,} groups"
    yield f"staleness: {bound}; {product} may be open at once, generating or stored"
    product = f"{rollout.most_servers} x {each:,} = {rollout.most_servers * each:,} at a time"
    how = "rollout.sequences, as far as the KV cache holds them"
    if rollout.sequences == "auto":
        start = min(share_of_batch(config), each)
        how = f"at most: rollout.sequences auto begins with {start:,} a server and adds some while the learner waits"
    yield f"sequences: {product}, {how}"
    held = "" if room.sequences is None else f"{room.sequences:,} sequences of {mean_tokens(config):,.0f} tokens, by "
    yield f"KV cache of a server: {held}{room.basis}"
    limit = "the places" if runs == each else "the KV cache" if runs < most_running(config) else MAX_NUM_SEQS
    if flow.running <= NEARLY_FULL * most:
        limit = "the bound on age (batch.max_staleness, batch.groups)"
    gain = flow.speed / expected(config, 0, runs).speed
    running = f"{flow.running:,.0f} of {most:,} sequences run at a time, limited by {limit}"
    yield f"to expect: {running}; mean age {flow.age:.1f}, {gain:.1f} times the versions of staleness 0"
    answer = max_sample_tokens(config) - config.data.max_prompt_tokens
    lengths = f"answers of {MEAN_SHARE * answer:,.0f} tokens in the mean, {MEAN_SHARE:g} of the longest, and geometric"
    yield f"assumed for that: {lengths}; a learner that takes {LEARNER_SHARE:g} of the time of full servers for a batch"


def _machines(config: Config) -> Iterator[str]:
    learner, rollout = config.learner, config.rollout
    ranks, budget = learner.ranks, learner.tokens_per_microbatch
    servers = rollout.least_servers
    serving = servers * rollout.tensor_parallel
    gpus = (ranks if learner.device != "cpu" else 0) + (serving if rollout.device != "cpu" else 0)
    parts = f"learner {ranks} rank{'s' * (ranks > 1)} + {servers} server{'s' * (servers > 1)}"
    if gpus == ranks + serving:
        maybe = "" if learner.device == rollout.device == "cuda" else ", or the CPU where there is none"
        yield f"GPUs: {parts} x tensor parallel {rollout.tensor_parallel} = {gpus}{maybe}"
    else:
        yield f"GPUs: {gpus}; {parts}, learner on {learner.device}, servers on {rollout.device}"
    shard = learner.shard or ranks // learner.nodes
    if (learner.nodes > 1 or learner.shard) and ranks % learner.nodes == 0 and ranks % shard == 0:  # else refused
        copies = f"{ranks // shard} copies of the model over {shard} ranks each, their gradients reduced once a version"
        if ranks == shard:
            copies = f"one copy of the model over {shard} ranks"
        yield f"learner: {ranks} ranks on {learner.nodes} node{'s' * (learner.nodes > 1)}: {copies}"
    if (most := rollout.most_servers) > servers:
        each = f"{rollout.tensor_parallel} GPU{'s' * (rollout.tensor_parallel > 1)} each where there are any"
        yield f"servers: {servers} to {most}, {each}: more while the learner waits, fewer while they do"
    if config.reward.servers:
        each = f"{config.reward.gpus} GPU{'s' * (config.reward.gpus > 1)} each where there are any"
        served = f"{config.reward.servers} of {config.reward.model}, from {config.reward.urls[0]} on"
        yield f"reward servers: {served}, {each}"
    yield from _teachers(config)
    sharing, who = learner.context_parallel, "a rank trains"
    if sharing > 1:
        yield f"long documents: {sharing} ranks share each microbatch, each with 1/{sharing} of its tokens"
        who = f"{sharing} ranks train together"
    samples, passes = config.batch.groups * config.batch.samples / parts_of(learner), "as many as fit its memory"
    if budget != "auto":
        number = ceil(samples / max(1, budget // max_sample_tokens(config)))
        passes = f"{number:,} of {budget:,} tokens if all samples are as long as they may be"
    yield f"microbatches: {who} about {samples:,.0f} samples per version, packed into forward passes, {passes}"


def _teachers(config: Config) -> Iterator[str]:
    alone = config.reward.function == NO_REWARD
    for source, teacher in config.teacher.teachers.items():
        rows = f"rows of {source}" if source else "rows of no other teacher" if config.teacher.by_source else "all rows"
        where = " or ".join(config.teacher.urls_of(source))
        if teacher.servers:
            gpus = f"{teacher.gpus} GPU{'s' * (teacher.gpus > 1)} each where there are any"
            where = f"{teacher.servers} server{'s' * (teacher.servers > 1)} of the run's own at {where}, {gpus}"
        gains = f"{teacher.weight:g} x (teacher's log-probability - policy's)"
        to = "has the advantage" if alone else "adds to its reward's advantage"
        gained = f"a sampled token {to} {gains}"
        if top_k := config.teacher.top_k:
            gained = f"the loss gains {teacher.weight:g} x the reverse KL over its {top_k} most probable tokens"
            gained += f", {top_k * TOP_BYTES} bytes a sampled token as stored and sent"
        yield f"teacher of {rows}: {teacher.model or teacher.url}, {where}; {gained}"


def _publishing(config: Config, gpu_bytes: int) -> Iterator[str]:
    sent, who = copies(config)
    if not sent:
        return
    where = "memory" if config.learner.device == "cpu" else "GPU, beside its shard"
    yield f"publishing: {who} holds {_with_prefix(sent)}B of copies for the servers in its {where}"
    if config.learner.device != "cpu":
        most = most_parameters(config, gpu_bytes) / 1e9
        yield f"publishing: copies of a full model of up to {most:,.0f} G parameters fit {who}"


def _kept(config: Config) -> int:
    """One being written is among them."""
    learner, versions = config.learner, config.run.versions
    every = versions // learner.keep_every if learner.keep_every else 0
    written = ceil(versions / learner.checkpoint_every) + every
    return min(learner.keep_checkpoints + learner.keep_best + every + 1, written)


def _each(config: Config) -> int:
    """At worst, each checkpoint has an export; else only the last."""
    critic = STATE_BYTES * keeps_critic(config)
    return checkpoint_bytes(1, config.model, bool(config.learner.export_every)) + critic


def _last_export(config: Config) -> int:
    """The last export may be written to a complete checkpoint."""
    return checkpoint_bytes(1, config.model, True) - checkpoint_bytes(1, config.model, False)


def _disk(config: Config) -> Iterator[str]:
    parameters, disk = facts_of(config.model).saved_parameters(config.model), disk_bytes(config)
    kept, each = _kept(config), _each(config)
    size = f"{each} bytes per parameter and checkpoint"
    if parameters and disk:
        per_parameter = f"({kept} x {each} + {_last_export(config)} bytes)"
        size = f"{_with_prefix(parameters)} parameters x {per_parameter} = {_with_prefix(disk)}B of disk"
    yield f"checkpoints: every {config.learner.checkpoint_every} versions, {kept} on disk while one is written: {size}"
    if config.learner.nodes > 1:
        shared = f"all {config.learner.nodes} nodes must share the folder {config.run.path}"
        alone = "they are on the first node's disk, and lost with that machine"
        yield f"checkpoints: {shared if config.learner.checkpoint_on == 'shared' else alone}"
    batch, limit = config.batch.groups * max_group_bytes(config), config.buffer.max_gib
    yield f"buffer: a batch takes at most {_with_prefix(batch)}B of the {limit:g} GiB that may be stored untrained"


def _buffer(config: Config, problems: int) -> Iterator[str]:
    held = f"{open_files(config):,} open files, of which {connections(config):,} are connections"
    memory = f"{memory_bytes(config, problems) / 2**30:.1f} GiB of memory at most, besides the text of the problems"
    yield f"the buffer's process: {held}; {memory}"


def _notes_on_flow(config: Config, problems: int | None, flow: Flow, runs: int) -> Iterator[str]:
    groups, staleness, each = config.batch.groups, admitted_staleness(config), places(config)
    running, most = most_running(config), config.rollout.most_servers * runs
    if staleness == 0:
        yield "staleness 0 is synchronous: the servers wait while the learner trains, it waits while they generate"
    elif flow.running < NEARLY_FULL * most and config.rollout.sequences != "auto":
        empty = f"the bound on age leaves {1 - flow.running / most:.0%} of the places empty"
        why = (
            f"most samples of the {open_groups(config):,} open groups have ended, and the groups wait for their longest"
        )
        remedy = f"raise batch.max_staleness ({2 * staleness}) or batch.groups ({2 * groups})"
        if fewer := _as_fast(config, flow, runs):
            remedy += f", or set rollout.sequences to {fewer}, which is as fast"
        yield f"{empty}: {why}; {remedy}"
    if running < each:
        rest = f"the other {each - running:,} wait inside vLLM and only get older"
        key = f"{MAX_NUM_SEQS} {running}"
        yield f"{key} is below rollout.sequences {each}: {rest}; set both to one number"
    if problems and problems < groups:
        yield f"{problems:,} problems are fewer than batch.groups {groups:,}: a batch has a problem more than once"


def _as_fast(config: Config, flow: Flow, runs: int) -> int | None:
    each, staleness = flow.running / config.rollout.most_servers, admitted_staleness(config)
    tried = (max(1, round(share * each / 16)) * 16 for share in (0.75, 1, 1.25, 1.5))
    fewer = (number for number in tried if number < runs)
    return next((n for n in fewer if expected(config, staleness, n).speed >= AS_FAST * flow.speed), None)


def _notes_on_learning(config: Config) -> Iterator[str]:
    algorithm, learner, versions = config.algorithm, config.learner, config.run.versions
    difficulty = config.data.difficulty
    if difficulty and difficulty.rest + difficulty.return_after >= versions:
        pause = f"data.difficulty.rest {difficulty.rest} + return_after {difficulty.return_after}"
        yield f"{pause} is not below run.versions {versions}: a retired problem returns only if no other may be drawn"
    if algorithm.loss == "gspo" and max(algorithm.clip_low, algorithm.clip_high) > 0.01:
        ranges = f"clip_low {algorithm.clip_low:g} and clip_high {algorithm.clip_high:g} never bind"
        yield f"algorithm.loss gspo clips ratios of whole sequences: {ranges}; 3e-4 and 4e-4 are usual"
    if learner.warmup_versions >= versions:
        warmup = f"learner.warmup_versions {learner.warmup_versions}"
        yield f"{warmup} is not below run.versions {versions}: the learning rate never reaches lr"
    if learner.checkpoint_every > versions:
        every = f"learner.checkpoint_every {learner.checkpoint_every}"
        yield f"{every} is more than run.versions {versions}: only the last version is kept"
    if algorithm.reference_kl > 0 and config.model.lora:
        yield "algorithm.reference_kl costs one more forward pass: the reference is the model without its adapter"
    elif algorithm.reference_kl > 0:
        yield "algorithm.reference_kl keeps a frozen copy of the model and costs one more forward pass"
    if keeps_critic(config):
        yield from _notes_on_critic(config)
    if algorithm.loss == "m2po":
        yield "algorithm.loss m2po costs one more forward pass: its budget is of the whole batch"
    if algorithm.turn_discount is not None and config.batch.skip_zero_variance:
        turns = "algorithm.turn_discount credits single turns, and groups are left out whose samples have equal rewards"
        yield f"{turns} in all, though their turns may differ; set batch.skip_zero_variance: false"


def _notes_on_critic(config: Config) -> Iterator[str]:
    critic, key = config.algorithm.critic, "algorithm.advantage gae"
    updates = f"{critic.updates} steps" if critic.updates > 1 else "a step"
    cost = f"one forward pass, {updates} of its own for each batch, and {STATE_BYTES} bytes per parameter"
    yield f"{key} trains a critic, a second copy of the model: {cost}, on GPUs and in each checkpoint"
    if critic.warmup_versions:
        warmup = f"algorithm.critic.warmup_versions {critic.warmup_versions}"
        yield f"{warmup}: servers sample with the initial policy until then, and the policy learns nothing"
    if config.batch.skip_zero_variance:
        left_out = "groups are left out whose samples have equal rewards"
        yield (
            f"{key} has no baseline of a group, but {left_out}, so that the critic never sees them; set"
            " batch.skip_zero_variance: false"
        )


def _notes_on_addresses(config: Config) -> Iterator[str]:
    host, limit = config.weights.host, config.buffer.max_message_mib
    here = config.buffer.host is None or is_loopback(config.buffer.host)
    if is_loopback(host) and not here:
        yield f"weights.host {host} is loopback: servers on other machines cannot fetch policies; name an interface"
    if config.learner.nodes > 1 and here:
        reach = f"ranks on other machines than the buffer cannot reach buffer.address {config.buffer.address}"
        yield f"learner.nodes {config.learner.nodes}: {reach}; name an interface"
    if config.buffer.path is None:
        yield "buffer.path null: stored groups are lost if the buffer's process dies"
    part = config.batch.groups * max_group_bytes(config) / parts_of(config.learner) / 2**20
    if part > limit:
        problem = f"a rank's part of a batch can take {part:,.0f} MiB, above buffer.max_message_mib {limit}"
        yield f"{problem}; raise it if answers get that long"


def _with_prefix(amount: int) -> str:
    """1543714304 -> `1.54 G`"""
    exponent = min(int(log10(amount)) // 3, 4)
    return f"{amount / 1000**exponent:.3g} {('', 'k', 'M', 'G', 'T')[exponent]}"
