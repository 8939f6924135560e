"""Forecasts a run on a card before anything starts.

Memory is the learner's own estimate, with `auto` decided as at its start. Speeds are estimates: the learner's by FLOPs
and MFU, a server's by `configs/flow/decoding.py`, both together by the simulation that `python -m configs` shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from actors.doctor.run_file import gpus_needed
from buffer.data.images import ImageFormat
from configs.checks import check, max_sample_tokens
from configs.context_parallel import why_not
from configs.critic import keeps_critic
from configs.flow.cards import CARDS, Card
from configs.flow.decoding import ServedModel, StepTime, step_time
from configs.flow.kv_room import KvRoom, kv_room
from configs.flow.sequences import MEAN_SHARE, admitted_staleness, mean_tokens
from configs.flow.simulation import Pace, expected, most_running
from configs.load import ConfigError
from configs.model_facts import BYTES, facts_of
from configs.schema import Config
from learner.algorithms.losses import needs_first_pass, needs_reference
from learner.model import speed
from learner.model.loading import read_config
from learner.model.memory import SHARE, GpuTooSmall, sizes_of
from learner.model.settled import Settled, settle
from learner.train.pictures import max_sample_patches

MFU = 0.46
"""A compiled learner's share of a card's peak, without recomputing: measured .41 (1.5B, H100) to .57 (7B, H200)."""
EXPERTS_MFU = 0.31
"""The same with a mixture of experts, by its active ones (`benchmarks/results/experts.json`)."""
ADAPTER_SPEED = 0.67
"""Measured with 7B, rank 32, 128 sequences (`benchmarks/results/adapters.json`)."""
SQUARES = 1.5
"""Mean square of lengths, as a multiple of the squared mean: geometric, cut at four times the mean."""
START_S = 100
"""Until the first version: 80 to 122 were measured with 1.5B."""
FREED = ("tokens_per_microbatch", "activation_checkpointing", "gather", "head_chunk_tokens")
"""Set to `auto` first where a run does not fit."""
LARGER = ("A100-80G", "H100", "H200", "B200")
NOTABLY = 1.1
"""A card with so many times the memory is a larger one; an A100 has .4 % more than an H100."""


@dataclass(frozen=True)
class Speed:
    """Estimated seconds and tokens, at the assumed lengths."""

    train_s: float
    """The learner trains a batch."""
    batch_s: float
    """One full server makes a batch."""
    version_s: float
    sampled: float
    running: float
    """Sequences of all servers."""

    @property
    def tokens_per_s(self) -> float:
        return self.sampled / self.version_s

    @property
    def servers(self) -> int:
        """Full servers that keep the learner busy."""
        return max(1, ceil(self.batch_s / self.train_s))


@dataclass(frozen=True)
class Forecast:
    """A run on `card`."""

    config: Config
    card: Card
    settled: Settled
    weights: int
    """Bytes on a server's GPU."""
    room: KvRoom
    speed: Speed | None
    """None without the card's FLOP/s, with cpu_offload or in float32."""

    @property
    def gpus(self) -> int:
        return sum(gpus_needed(self.config, 1).values())

    @property
    def seconds(self) -> float | None:
        """Until the last version."""
        return START_S + self.config.run.versions * self.speed.version_s if self.speed else None


ELSEWHERE: dict[str, dict[str, Any]] = {
    "learner.cpu_offload: optimizer": {"learner": {"cpu_offload": "optimizer"}},
    "learner.cpu_offload: true": {"learner": {"cpu_offload": True}},
    "an adapter, model.lora: {rank: 32}": {"model": {"lora": {"rank": 32}}},
}
"""Keys that keep less learner state on a GPU."""
WITHOUT_CRITIC: dict[str, dict[str, Any]] = {
    "algorithm.advantage: group_mean, without a critic": {"algorithm": {"advantage": "group_mean", "critic": {}}}
}


def forecast(config: Config, card: Card, patches: int = 0) -> Forecast:
    """Raises ConfigError if the learner or a server does not fit, with what would."""
    wrong: list[str] = []
    try:
        settled = settle(config, card.free, patches)
    except ConfigError as error:
        small = isinstance(error, GpuTooSmall)
        fit = f"; on {card.name} {fitting(config, card, patches)}" if small else ""
        wrong += [f"{line}{fit}" for line in error.problems]
    served = _with(config, model={"path": folder_of(config.model.path)})
    parameters = facts_of(served.model).parameters or sizes_of(config.model).parameters
    weights = parameters * BYTES[config.model.dtype] // config.rollout.tensor_parallel
    room = kv_room(served, card.total, f"such as {card.name}", parameters)
    wrong += server_misfit(served, card, weights, room)
    if wrong:
        raise ConfigError(wrong)
    return Forecast(config, card, settled, weights, room, speed_of(served, card, settled, room))


def folder_of(path: str) -> str:
    """The folder of a model that has a hub name, once its config.json has been read; else `path`."""
    found = None if Path(path).is_dir() else try_to_load_from_cache(path, "config.json")
    return str(Path(found).parent) if isinstance(found, str) else path


def patches_of(config: Config) -> int:
    """Most patches of one sample. Raises ConfigError."""
    read_config(config.model)
    form = ImageFormat.of_run(config)
    return max_sample_patches(config, form) if form else 0


def fitting(config: Config, card: Card, patches: int) -> str:
    """Single changes of the run file that the rules allow, or a larger card, with which the learner fits. Other keys
    stay as they are written if `auto` alone fits, else each change takes `auto` along."""
    written, faults = {key: getattr(config.learner, key) for key in FREED}, _faults(config)
    freed = {key: "auto" for key, value in written.items() if value != "auto"}
    with_auto = ", ".join(f"learner.{key}: auto" for key in freed)

    def fits(changed: Config, on: Card = card) -> bool:
        return _faults(changed) <= faults and _fits(changed, on, patches)

    found = [with_auto] if freed and fits(_with(config, learner=freed)) else []
    base, aside = (config, "") if found or not freed else (_with(config, learner=freed), f" with {with_auto}")
    ranks = ((f"learner.ranks: {n * base.learner.ranks}", {"ranks": n * base.learner.ranks}) for n in (2, 4, 8))
    wider = ((text, _with(base, learner=keys)) for text, keys in ranks if not base.learner.shard)
    wider_fit = (text + aside for text, changed in (*wider, *_shared(base)) if fits(changed))
    found += islice(wider_fit, 1)
    ways = ELSEWHERE | (WITHOUT_CRITIC if keeps_critic(config) else {})
    kept = {text: keys for text, keys in ways.items() if not (config.model.lora and "model" in keys)}
    found += [text + aside for text, keys in kept.items() if fits(_with(base, **keys))]
    larger = (CARDS[name] for name in LARGER if CARDS[name].total > NOTABLY * card.total)
    found += islice((f"--gpu {other.name}" + aside for other in larger if fits(base, other)), 1)
    return f"these fit: {'; or '.join(found)}" if found else "no single change of the learner's keys fits"


def _shared(config: Config) -> Iterator[tuple[str, Config]]:
    learner = config.learner
    for n in (2, 4, 8) if not learner.shard and facts_of(config.model).image_token is None else ():
        keys = {"ranks": n * learner.ranks, "context_parallel": n * learner.context_parallel}
        yield " with ".join(f"learner.{key}: {value}" for key, value in keys.items()), _with(config, learner=keys)


def _with(config: Config, **sections: dict[str, Any]) -> Config:
    tree = config.model_dump()
    return Config.model_validate(tree | {name: tree[name] | keys for name, keys in sections.items()})


def _faults(config: Config) -> set[str]:
    """What the rules say of the run file itself."""
    try:
        check(config, files=())
    except ConfigError as error:
        return {*error.problems}
    return set()


def _fits(config: Config, card: Card, patches: int) -> bool:
    try:
        settled = settle(config, card.free, patches)
    except ConfigError:
        return False
    ranks = [settled.first, *([settled.others] if settled.others else [])]
    return not any(rank.fills(card.free) for rank in ranks)


def server_misfit(config: Config, card: Card, weights: int, room: KvRoom) -> Iterator[str]:
    """vLLM refuses a KV cache that cannot hold the longest sample."""
    longest, shards = max_sample_tokens(config), config.rollout.tensor_parallel
    if room.tokens is None or room.tokens >= longest or config.rollout.device == "cpu":
        return
    parameters, heads = weights * shards // BYTES[config.model.dtype], facts_of(config.model).queries_and_keys
    more = [n for n in (2, 4, 8) if n > shards and not why_not(*heads, n)]
    wider = ((n, _with(config, rollout={"tensor_parallel": n})) for n in more)
    held = ((n, kv_room(changed, card.total, "", parameters).tokens or 0) for n, changed in wider)
    enough = next(
        (f"set it to {n}" for n, tokens in held if tokens >= longest), "take a smaller model or a larger card"
    )
    holds = f"a server with {weights / 1e9:.3g} GB of weights on each {card.name} has room for {room.tokens:,} tokens"
    yield f"rollout.tensor_parallel: {shards}: {holds}, and a sample may have {longest:,}; {enough}"


def speed_of(config: Config, card: Card, settled: Settled, room: KvRoom) -> Speed | None:
    """The estimated speed; None where nothing is known to estimate it by."""
    facts = facts_of(config.model)
    if not (card.peak and card.bandwidth and facts.kv_numbers) or settled.learner.cpu_offload:
        return None
    if config.model.dtype != "bfloat16":
        return None
    train_s = train_seconds(config, card.peak, settled)
    most = max(1, min(most_running(config), room.sequences or most_running(config)))
    step = server_step(config, card.peak, card.bandwidth, facts.kv_numbers)
    sampled = config.batch.groups * config.batch.samples * mean_answer(config)
    flow = expected(config, admitted_staleness(config), most, Pace(step.fixed / step.each, train_s / step.each))
    return Speed(train_s, sampled / step.tokens_per_s(most), step.each / flow.speed, sampled, flow.running)


def mean_answer(config: Config) -> float:
    """Sampled tokens of a sample, as assumed in `configs/flow/sequences.py`."""
    return MEAN_SHARE * (max_sample_tokens(config) - config.data.max_prompt_tokens)


def train_seconds(config: Config, peak: float, settled: Settled) -> float:
    """For a batch of mean lengths."""
    batch, prompt, answer = config.batch, MEAN_SHARE * config.data.max_prompt_tokens, mean_answer(config)
    prompts = batch.groups * (1 if config.learner.share_prompts else batch.samples)
    answers = batch.groups * batch.samples
    squares = prompts * SQUARES * prompt**2 + answers * (SQUARES * answer**2 + 2 * prompt * answer)
    costs, tokens = sizes_of(config.model).costs, prompts * prompt + answers * answer
    flops = costs.total(tokens, answers * answer, squares)
    forward_passes = needs_reference(config.algorithm) + needs_first_pass(config.algorithm)
    flops *= 1 + forward_passes / 3
    if keeps_critic(config):  # a judging pass, then its steps; a value head costs nothing
        flops += costs.total(tokens, 0, squares) * (1 / 3 + config.algorithm.critic.updates)
    each = flops * speed.step_time(settled.learner, len(sizes_of(config.model).of_blocks))
    mfu = EXPERTS_MFU if facts_of(config.model).experts else MFU
    return each / (settled.learner.ranks * peak * mfu)


def server_step(config: Config, peak: float, bandwidth: float, kv_numbers: int) -> StepTime:
    """A decode step of one server, its sequences of mean length."""
    sizes, width = sizes_of(config.model), BYTES[config.model.dtype]
    read = sizes.blocks + sizes.output
    idle = sizes.parameters - sizes.active
    served = ServedModel(read, read - idle, kv_numbers, width)
    step = step_time(served, peak, bandwidth, config.rollout.tensor_parallel, mean_tokens(config))
    slower = 1 / ADAPTER_SPEED if config.model.lora else 1
    return StepTime(step.fixed * slower, step.each * slower)


def above_auto(found: Forecast, patches: int = 0) -> Iterator[str]:
    """Note keys that fill more of a GPU than `auto` would."""
    written = found.config.learner.tokens_per_microbatch
    if written == "auto" or not found.settled.first.fills(found.card.free):
        return
    share = found.settled.first.total / found.card.free
    try:
        automatic = settle(_with(found.config, learner={"tokens_per_microbatch": "auto"}), found.card.free, patches)
    except ConfigError:
        takes = "no microbatch that leaves a tenth free holds the longest sample"
    else:
        takes = f"auto takes {automatic.first.tokens:,}"
    fills = f"fills {share:.0%} of rank 0's {found.card.name}, above the {SHARE:.0%} that leave room for fragmentation"
    yield f"learner.tokens_per_microbatch: {written:,} {fills}; {takes}"
