"""Estimates, before weights are loaded, what a rank's GPU will hold and which microbatch fills it, by passes on the
meta device.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isqrt
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from configs.architecture import MUTUAL
from configs.checks import max_sample_tokens
from configs.context_parallel import parts_of
from configs.critic import STATE_BYTES, keeps_critic
from configs.load import ConfigError
from configs.publishing import COPIES_SHARE, held, publishes_rows, remedy
from configs.schema import Config, LearnerConfig, ModelConfig
from learner.mesh import ranks_of_node
from learner.model import attention
from learner.model.alive import Line
from learner.model.block_traces import BlockTrace, ModelTrace, trace_compiled, trace_model
from learner.model.compiled_trace import MATMULS
from learner.model.context import planned
from learner.model.epilogue import Epilogue
from learner.model.experts.mixture import Mixture, has_expert_layers
from learner.model.float8 import cast_bytes
from learner.model.flops import Costs, active_parameters
from learner.model.head import chunk_tokens
from learner.model.host_copies import INPUTS_HELD
from learner.model.idle_parts import idle_modules, sees
from learner.model.kernels.operators import ATTEND
from learner.model.loading import all_blocks, blocks, build_on_meta, read_config
from learner.model.lora.adapter import Adapted, adapt
from learner.model.master_weights import KINDS, PORTION, device_bytes
from learner.model.recomputing import recompute
from learner.model.towers import ImageBlocks, tower_parts
from learner.model.value_head import replace_head
from learner.model.vision import COLOURS, PATCHES_PER_TOKEN, Sight, freeze

log = logging.getLogger(__name__)
GIB = 2**30
SHARE = 0.9
"""Share of GPU memory that `tokens_per_microbatch: auto` fills; CUDA, NCCL and fragmentation take the rest."""
ENOUGH_TOKENS = 8192
"""So many tokens fill a GPU and hide the gathering of weights."""
AUTO_TOKENS_ON_CPU = 8192
META_TOKENS = 64
META_ATTENTION = attention.registered("varlen")


class OutOfMemory(RuntimeError):
    """The GPU is full; the text names the consumers and a remedy."""


class GpuTooSmall(ConfigError):
    """A GPU holds less than a rank takes."""


@dataclass(frozen=True)
class PeakCandidate:
    """A moment at which memory may peak: bytes by consumer."""

    fixed: dict[str, int]
    per_token: dict[str, int]

    def items(self, tokens: int) -> dict[str, int]:
        grown = {name: size * tokens for name, size in self.per_token.items()}
        return {name: self.fixed.get(name, 0) + grown.get(name, 0) for name in self.fixed | grown}

    def total(self, tokens: int) -> int:
        return sum(self.items(tokens).values())


@dataclass(frozen=True)
class Estimate:
    """Peak bytes of one rank's GPU."""

    candidates: list[PeakCandidate]

    def total(self, tokens: int) -> int:
        return max(candidate.total(tokens) for candidate in self.candidates)

    def fit(self, available: int) -> int:
        """Tokens of the largest microbatch in `available` bytes, a multiple of 256; 0 or less if nothing fits."""
        fits = [(available - peak.total(0)) // max(sum(peak.per_token.values()), 1) for peak in self.candidates]
        return min(fits) // 256 * 256

    def describe(self, tokens: int) -> str:
        peak = max(self.candidates, key=lambda candidate: candidate.total(tokens))
        sizes = sorted(peak.items(tokens).items(), key=lambda item: -item[1])
        return f"{self.total(tokens) / GIB:.1f} GiB = " + " + ".join(f"{size / GIB:.1f} {name}" for name, size in sizes)


def gpu_memory(device: torch.device) -> int | None:
    """GPU bytes that no other process holds, None on CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return min(total, free + torch.cuda.memory_reserved(device))


def share_of_batch(config: Config, patches: int = 0) -> int:
    """The most tokens of a microbatch that a rank's part of a batch takes, each sample with `patches` at most."""
    samples = config.sft.rows or config.batch.groups * config.batch.samples
    return -(-samples // parts_of(config.learner)) * max(max_sample_tokens(config), -(-patches // PATCHES_PER_TOKEN))


def least_microbatch(config: Config, patches: int = 0) -> int:
    """Tokens of the largest microbatch that must fit."""
    wanted, sample = config.learner.tokens_per_microbatch, max_sample_tokens(config)
    return max(sample, -(-patches // PATCHES_PER_TOKEN), 0 if wanted == "auto" else wanted)


def is_single(
    config: Config, available: int | None, shards: int, reference: bool, sends: int, patches: int = 0
) -> bool:
    """Whether a rank has room for its part of a batch in one microbatch. `available`: bytes, None on CPU.

    If all ranks have it, gradients come while activations go. `learner.gather: auto` counts as `pass`.
    """
    if available is None or keeps_critic(config) or patches or config.data.demonstrations:
        return False
    room = config.learner.tokens_per_microbatch
    if room == "auto":
        room = estimate(config.model, config.learner, shards, reference, sends, alone=True).fit(int(SHARE * available))
    return share_of_batch(config) <= room


def memory_budget(
    config: Config,
    device: torch.device,
    shards: int,
    reference: bool,
    sends: int,
    patches: int = 0,
    single: bool = False,
) -> tuple[Estimate, int]:
    """`budget_in`, and a check of the host's memory."""
    expected, budget = budget_in(config, gpu_memory(device), shards, reference, sends, patches, single)
    if device.type == "cuda":
        ranks = ranks_of_node(config.learner, config.learner.ranks, os.environ)
        check_host(
            config, max(budget, least_microbatch(config, patches)), ranks, psutil.virtual_memory().available, shards
        )
    return expected, budget


def budget_in(
    config: Config,
    available: int | None,
    shards: int,
    reference: bool,
    sends: int,
    patches: int = 0,
    single: bool = False,
) -> tuple[Estimate, int]:
    """Estimate a rank's memory and its microbatches' tokens. `available`: bytes, None on CPU. `single`: on all ranks
    (`is_single`). Raises ConfigError if the GPU is too small.
    """
    wanted, least = config.learner.tokens_per_microbatch, least_microbatch(config, patches)
    sizes = config.model, config.learner, shards, reference, sends, keeps_critic(config)
    expected, share = estimate(*sizes, alone=single), share_of_batch(config, patches)
    if available is None:
        return expected, max(AUTO_TOKENS_ON_CPU, least) if wanted == "auto" else wanted
    budget = min(expected.fit(int(SHARE * available)), share) if wanted == "auto" else wanted
    needed = expected.describe(max(budget, least))
    log.info("%d tokens per microbatch: a rank takes %s of %.1f GiB", budget, needed, available / GIB)
    if (wanted == "auto" and budget < least) or expected.total(max(budget, least)) > available:
        images = f" and {patches} patches of images" if patches else ""
        check_copies(expected, available, config, shards)
        longest = max(max_sample_tokens(config), -(-patches // PATCHES_PER_TOKEN))
        took = f"a sample of {max_sample_tokens(config)} tokens{images} takes"
        took = took if wanted == "auto" or wanted < least else f"a microbatch of {wanted} tokens takes"
        problem = f"learner.tokens_per_microbatch: {wanted}: {took} {needed}, a GPU has {available / GIB:.1f} GiB"
        problem += f", of which auto fills {SHARE * available / GIB:.1f}" if expected.total(least) <= available else ""
        more = "learner.ranks" if shards == config.learner.ranks else "learner.shard"
        more += " or learner.context_parallel" * (shards % (2 * config.learner.context_parallel) == 0 and not patches)
        change = f"lower it to as few as {longest}, " if wanted != "auto" and wanted > longest else ""
        set_ = " or ".join(_with_less(config))
        change += f"set {set_}, or raise {more}" if set_ else f"raise {more}"
        change += ", or lower data.max_pixels" if patches else ""
        raise GpuTooSmall([f"{problem}; {change}"])
    return expected, budget


def _with_less(config: Config) -> Iterator[str]:
    """Keys that take less memory, and are not set yet."""
    learner, way = config.learner, config.learner.activation_checkpointing
    if learner.gather != "pass":
        yield "learner.gather: pass"
    few = isinstance(way, int) and way < len(sizes_of(config.model).of_blocks)
    if few or way in ("auto", "none", "selective"):
        yield "learner.activation_checkpointing: block"
    if keeps_critic(config):
        yield "algorithm.advantage: group_mean"
    elif learner.cpu_offload is False:
        yield "learner.cpu_offload"
    elif learner.cpu_offload == "optimizer":
        yield "learner.cpu_offload: true"


class RankRoom(NamedTuple):
    """What decides how much fits a rank, besides the model and the keys of the learner."""

    shards: int
    """Ranks that share a copy of the model."""
    memory: int | None
    """Bytes of its GPU; None on CPU."""
    tokens: int
    """Of the largest microbatch that must fit."""
    reference: bool = False
    sends: int = 0
    """As in `estimate`."""
    critic: bool = False

    def estimate(self, model: ModelConfig, learner: LearnerConfig) -> Estimate:
        return estimate(model, learner, self.shards, self.reference, self.sends, self.critic)


def host_bytes(model: ModelConfig, learner: LearnerConfig, tokens: int) -> int:
    """A rank's pinned memory with microbatches of `tokens`, for `activation_checkpointing: offload`."""
    if learner.activation_checkpointing != "offload":
        return 0
    size = sizes_of(model)
    return len(size.of_blocks) * size.width * -(-tokens // learner.context_parallel)


def host_state_bytes(model: ModelConfig, learner: LearnerConfig, shards: int) -> int:
    if not learner.cpu_offload:
        return 0
    size = sizes_of(model)
    if learner.cpu_offload == "optimizer":
        return 4 * KINDS * size.trained // shards
    return (size.held + 12 * size.trained) // shards


def check_host(config: Config, tokens: int, ranks: int, available: int, shards: int) -> None:
    inputs, state = (
        ranks * size
        for size in (
            host_bytes(config.model, config.learner, tokens),
            host_state_bytes(config.model, config.learner, shards),
        )
    )
    if inputs:
        log.info("activation_checkpointing: offload keeps %.1f GiB in host memory, for %d ranks", inputs / GIB, ranks)
    if state:
        log.info("cpu_offload keeps %.1f GiB in host memory, for %d ranks", state / GIB, ranks)
    if state > available:
        problem = f"{ranks} ranks would keep {state / GIB:.1f} GiB in host memory, and {available / GIB:.1f} GiB"
        key = f"learner.cpu_offload: {str(config.learner.cpu_offload).lower()}"
        raise ConfigError([f"{key}: {problem} are free; set it to false with more learner.ranks, or add memory"])
    if inputs + state > available:
        problem = f"{ranks} ranks would keep {inputs / GIB:.1f} GiB of inputs in host memory, and"
        free = f"{(available - state) / GIB:.1f} GiB are free"
        remedy = "lower learner.tokens_per_microbatch, raise learner.context_parallel, or set it to block"
        raise ConfigError([f"learner.activation_checkpointing: offload: {problem} {free}; {remedy}"])


def check_copies(expected: Estimate, available: int, config: Config, shards: int) -> None:
    """Raise ConfigError if the servers' copies alone do not fit: only more ranks make them smaller."""
    copies = expected.candidates[0].fixed.get("copies to send", 0)
    if copies > COPIES_SHARE * available:
        who = "a rank" if publishes_rows(config, shards) else "rank 0"
        problem = f"model.path: {who} holds {held(config)} for the servers, {copies / GIB:.1f} GiB"
        raise GpuTooSmall([f"{problem}, but a GPU has {available / GIB:.1f} GiB; {remedy(config, shards)}"])


def estimate(
    model: ModelConfig,
    learner: LearnerConfig,
    shards: int,
    reference: bool = False,
    sends: int = 0,
    critic: bool = False,
    alone: bool = False,
) -> Estimate:
    """Estimate the memory of one of `shards` ranks that share a copy of the model.

    `sends`: ranks over which servers' copies are spread, 0 if this GPU holds none. `alone`: a batch is one microbatch,
    so gradients come while activations go. An undecided `auto` takes the least memory.
    """
    size, width = sizes_of(model), getattr(torch, model.dtype).itemsize
    always = _always(size, learner, width, shards, reference, alone)
    if critic:
        always["critic"] = STATE_BYTES * size.critic // shards
    if sends:  # twice what is trained, once what is frozen
        always["copies to send"] = width * (size.trained + (size.trained if model.lora else size.parameters)) // sends
    images, in_tower = _saved_by_tower(size, learner)
    row = _row_of(model, learner)
    found = _moments(_Rank(size, learner, width, shards, reference, alone), row, always, images, in_tower)
    if learner.cpu_offload == "optimizer":
        portions = device_bytes(size.trained // shards, PORTION)
        found.append(PeakCandidate(always | {"optimizer's portions": portions}, {}))
    return Estimate(found)


def _always(
    size: "ModelSizes", learner: LearnerConfig, width: int, shards: int, reference: bool, alone: bool
) -> dict[str, int]:
    on_gpu, apart = 0 if learner.cpu_offload is True else 1, learner.cpu_offload == "optimizer"
    rounded = (4 - width) * size.trained if apart else 0
    always = {
        "weights": (size.held * on_gpu * (1 + reference) - rounded) // shards,
        "gradients": 4 * size.trained * on_gpu // shards,
        "optimizer": 0 if apart else 8 * size.trained * on_gpu // shards,
    }
    if learner.gather == "batch":  # whole until the last backward pass
        always["gradients"] = 4 * size.trained
    elif isinstance(learner.gather, int) and not alone:
        always["gradients"] = 4 * (size.trained - size.ends) * on_gpu // shards + 4 * size.ends
    return always


@dataclass(frozen=True)
class _Rank:
    size: "ModelSizes"
    learner: LearnerConfig
    width: int
    """Bytes of a number in `model.dtype`."""
    shards: int
    reference: bool
    alone: bool

    @property
    def once(self) -> bool:
        return self.learner.gather == "batch"

    @property
    def root(self) -> int:
        """Parameters that are gathered in all passes."""
        return self.size.parameters - self.size.blocks - self.size.idle

    @property
    def comes(self) -> int:
        """Blocks that each pass gathers: the first ones."""
        if self.once:
            return 0
        held = self.learner.gather if isinstance(self.learner.gather, int) else 0
        return max(0, len(self.size.of_blocks) - held)

    @property
    def held(self) -> int:
        """Parameters of blocks that stay gathered between the passes of a batch."""
        return self.size.blocks if self.once else sum(each.parameters for each in self.size.of_blocks[self.comes :])

    def gathered(self, block: int, last: bool) -> int:
        """Gathered bytes while a block computes gradients.

        With several ranks the next block comes meanwhile; with `once` the `last` pass of a batch gives up later blocks.
        """
        root, sizes = self.root * (1 + self.reference), self.size.of_blocks
        if self.once:
            given_up = sum(each.parameters for each in sizes[block + 1 :]) if last else 0
            return self.width * (root + self.held - given_up)
        here = sizes[max(0, block - (self.shards > 1)) : min(block + 1, self.comes)]
        return self.width * (root + self.held + sum(each.parameters for each in here))

    def gradients(self, block: int, always: int, last: bool) -> int:
        """Bytes of gradients before this block's are reduced."""
        later = 4 * sum(each.trained for each in self.size.of_blocks[block + 1 :])
        if self.once:
            return always - (later - later // self.shards if last else 0)
        return min(later // self.shards, always) if self.alone else always  # 0: they go to host memory as they come

    @property
    def reduced(self) -> int:
        """Bytes for each of a block's gradients while it is reduced: a copy in fp32, and its source or its share."""
        return max(self.width, 4) if self.once else 4 + max(self.width, 4 // self.shards)

    @property
    def reduced_at_ends(self) -> int:
        """The same for each gradient outside of the blocks."""
        added_up = isinstance(self.learner.gather, int) and not self.alone
        return max(self.width, 4) if added_up else self.reduced


def _moments(
    rank: _Rank, row: ModelTrace, always: dict[str, int], images: dict[str, int], in_tower: int
) -> list[PeakCandidate]:
    size, held = rank.size, [block.kept for block in row.blocks]
    head = rank.width * (size.output if size.output_is_trained else 0)
    if rank.learner.activation_checkpointing == "offload":  # the others wait in host memory
        held = [0] * (len(held) - INPUTS_HELD) + held[-INPUTS_HELD:]
    found = [_at_head(rank, always, head, sum(held) + row.ends, images)]
    for last in (False, True) if rank.once else (True,):
        for number, block in enumerate(row.blocks):
            fixed = always | {
                "gradients": rank.gradients(number, always["gradients"], last),
                "gathered weights": rank.gathered(number, last),
                "head": head,
            }
            found += _in_block(rank, block, number, fixed, sum(held[:number]), images, last)
    rest = {"gathered weights": rank.gathered(0, last=True)}
    if images:  # when what the text model kept is gone
        towers = (each.trained for each in size.of_all_blocks if each not in size.of_blocks)
        own = {"head": head, "block's gradient": (4 + rank.width) * max(towers, default=0)}
        found.append(PeakCandidate(always | rest | own, images | {"backward pass": in_tower}))
    return [*found, PeakCandidate(always | rest | {"head": rank.reduced_at_ends * size.ends}, {})]


def _in_block(
    rank: _Rank,
    block: BlockTrace,
    number: int,
    fixed: dict[str, int],
    before: int,
    images: dict[str, int],
    last: bool,
) -> list[PeakCandidate]:
    """`before`: bytes kept by earlier blocks."""
    sizes, parallel = rank.size.of_blocks, rank.learner.context_parallel
    grown = {"activations": -(-before // parallel)} | images
    casts, per_token = rank.size.casts if rank.learner.matmul == "fp8" else (0, 0)
    if casts:
        fixed, grown = fixed | {"casts to FP8": casts}, grown | {"casts to FP8": -(-per_token // parallel)}
    # gradients of the pass's previous block are held in fp32 until this block's are reduced
    reduced = 4 * sizes[number + 1].trained if last and number + 1 < len(sizes) else 0
    found = []
    for line in block.moments:
        gradients, working = {"block's gradient": reduced + line.fixed}, -(-line.per_token // parallel)
        found.append(PeakCandidate(fixed | gradients, grown | {"backward pass": working}))
    gradients, working = {"block's gradient": rank.reduced * sizes[number].trained}, 2 * rank.size.width
    return [*found, PeakCandidate(fixed | gradients, grown | {"backward pass": -(-working // parallel)})]


def _at_head(rank: _Rank, always: dict[str, int], head: int, kept: int, images: dict[str, int]) -> PeakCandidate:
    """The head's gradient in fp32, a chunk's logits, their gradient and a softcap's slope; then the gradient in
    `model.dtype`. Final hidden states are there three times: all, those that are predicted from, and their gradient.
    """
    size, learner, width = rank.size, rank.learner, rank.width
    chunk = chunk_tokens(learner) * size.vocabulary
    logits = (4 + width) * chunk + (4 * chunk if size.softcap else 0)
    rest = {"head": 4 * head // width + max(logits, head)}
    # between ranks FSDP keeps a copy of the last block it gathered; where all stay, only before there are gradients
    copy = width * size.of_blocks[max(0, rank.comes - 1)].parameters if rank.shards > 1 else 0
    copy = copy if rank.comes else max(0, copy - always["gradients"])
    rest["gathered weights"] = width * (rank.root * (1 + rank.reference) + rank.held) + copy
    if rank.alone and not rank.once:
        rest["gradients"] = 0
    kept = -(-(kept + 3 * size.width) // learner.context_parallel)
    return PeakCandidate(always | rest, {"activations": kept} | images)


@dataclass(frozen=True)
class BlockSize:
    parameters: int
    trained: int

    @classmethod
    def of(cls, block: nn.Module) -> "BlockSize":
        every = list(block.parameters())
        return cls(sum(p.numel() for p in every), sum(p.numel() for p in every if p.requires_grad))


@dataclass(frozen=True)
class Traced:
    """Bytes per token or patch that a stack of blocks keeps."""

    everything: int
    matmuls: int
    inputs: int
    layers: int
    width: int
    """Bytes of a block's input."""
    widest: int


@dataclass(frozen=True)
class ModelSizes:
    """Parameters of a model, and bytes per token or patch."""

    parameters: int
    trained: int
    held: int
    """Bytes of all parameters."""
    of_blocks: tuple["BlockSize", ...]
    of_all_blocks: tuple["BlockSize", ...]
    """Includes a tower's."""
    output: int
    output_is_trained: bool
    vocabulary: int
    width: int
    """Bytes of a token's hidden state."""
    costs: Costs
    active: int
    tower: Traced | None = None
    tower_is_trained: bool = False
    ends_of_tower: int = 0
    """Bytes per patch outside of the tower's blocks."""
    given_to_tower: int = 0
    """Bytes per patch: its colours, and what is computed of its place on the CPU."""
    softcap: bool = False
    idle: int = 0
    critic: int = 0
    casts: tuple[int, int] = (0, 0)

    @property
    def blocks(self) -> int:
        return sum(block.parameters for block in self.of_all_blocks)

    @property
    def ends(self) -> int:
        """Trained parameters outside of the blocks."""
        return self.trained - sum(block.trained for block in self.of_all_blocks)


def sizes_of(model: ModelConfig) -> ModelSizes:
    return _sizes_of(*_key(model))


@lru_cache(maxsize=16)
def _sizes_of(written: str, config_json: str) -> ModelSizes:
    """`config_json` is for the cache's key."""
    model = ModelConfig.model_validate_json(written)
    empty = _trained_on_meta(model)
    every = {id(block): BlockSize.of(block) for block in all_blocks(empty)}
    output = empty.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    held, costs, active = sum(p.nbytes for p in empty.parameters()), Costs.of(empty), active_parameters(empty)
    _cast(empty, model)
    tower, trained, ends, given = _tower_trace(empty, model)
    return ModelSizes(
        empty.num_parameters(),
        empty.num_parameters(only_trainable=True),
        held,
        tuple(every[id(block)] for block in blocks(empty)),
        tuple(every.values()),
        output.numel(),
        output.requires_grad,
        empty.config.get_text_config().vocab_size,
        empty.config.get_text_config().hidden_size * getattr(torch, model.dtype).itemsize,
        costs,
        active,
        tower,
        trained,
        ends,
        given,
        Epilogue.of(empty.config).softcap is not None,
        sum(p.numel() for part in idle_modules(empty) for p in part.parameters()),
        _critic_parameters(empty),
        cast_bytes(empty),
    )


def _critic_parameters(empty: PreTrainedModel) -> int:
    replace_head(empty)
    return int(empty.num_parameters())


def _cast(empty: PreTrainedModel, model: ModelConfig) -> torch.dtype:
    """On meta torch multiplies by experts in bfloat16 only."""
    dtype: torch.dtype = torch.bfloat16 if has_expert_layers(empty) else getattr(torch, model.dtype)
    nn.Module.to(empty, dtype)
    return dtype


def _decode(empty: PreTrainedModel, context_parallel: int, number: int) -> Tensor:
    """Final hidden states of a row of `number` tokens."""
    tokens = torch.zeros(1, number, dtype=torch.int64, device="meta")
    given: dict[str, Any] = {"input_ids": tokens, "position_ids": tokens, "use_cache": False}
    given |= {"cu_seq_lens_q": _meta_places(), "max_length_q": number}
    if context_parallel > 1:
        given["context_group"] = planned(context_parallel)
    if empty.config.model_type in MUTUAL and sees(empty.config):
        places = torch.zeros(number, dtype=torch.int64, device="meta"), _meta_places(), number
        given["image_blocks"] = ImageBlocks(*places, *places)
    hidden: Tensor = empty.get_decoder()(**given).last_hidden_state  # type: ignore[no-untyped-call]
    return hidden


def _row_of(model: ModelConfig, learner: LearnerConfig) -> ModelTrace:
    """Per token of a rank's slice."""
    way, given = learner.activation_checkpointing, (*_key(model), learner.context_parallel)
    compiled = learner.compile is True
    if isinstance(way, int):
        kept, computed = (_traced_row(*given, each, compiled) for each in ("none", "block"))
        return ModelTrace(computed.blocks[:way] + kept.blocks[way:], max(kept.ends, computed.ends))
    way = "block" if way in ("auto", "offload") else way
    way = "none" if way == "selective" and compiled else way
    return _traced_row(*given, way, compiled)


def _key(model: ModelConfig) -> tuple[str, str]:
    return model.model_dump_json(), read_config(model).to_json_string()


@lru_cache(maxsize=16)
def _traced_row(written: str, config_json: str, context_parallel: int, way: str, compiled: bool) -> ModelTrace:
    """`config_json` is for the cache's key."""
    model = ModelConfig.model_validate_json(written)
    empty = _trained_on_meta(model)
    width, traced_in = getattr(torch, model.dtype).itemsize, _cast(empty, model)
    decode = partial(_decode, empty, context_parallel)
    try:
        recompute(empty, way, compiled)
        found = trace_compiled(empty, decode, way == "block") if compiled else trace_model(empty, decode)
    except ConfigError:
        raise
    except Exception as error:  # the code of any model runs here
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        log.warning("memory: %s has a backward pass that cannot be traced (%s); its estimate is rough", model.path, why)
        found = _rough_row(model, context_parallel, "compiled" if compiled and way == "none" else way)
    return found.scaled(width / traced_in.itemsize)


def _rough_row(model: ModelConfig, context_parallel: int, way: str) -> ModelTrace:
    """`_traced_row` by forward passes alone, as if blocks took equal memory in their backward passes."""
    empty = _trained_on_meta(model)
    width, every = _cast(empty, model).itemsize * empty.config.get_text_config().hidden_size, blocks(empty)
    decode = partial(_decode, empty, context_parallel, META_TOKENS)
    kept, own = _trace(empty, decode), _kept_by_blocks(empty, decode)
    held, working = _saved(Traced(*kept[:3], len(every), width, kept[3]), way)
    ends = max(kept[0] - sum(own), 0)
    held = len(every) * width if way == "block" else max(held - ends, 0)

    def of(block: nn.Module, share: float) -> BlockTrace:
        gradients = sum(p.nbytes for p in block.parameters() if p.requires_grad)
        return BlockTrace(round(share * held), (Line(gradients, round(share * held) + working),))

    own = [1] * len(every) if way == "block" else own  # inputs are of one size
    shares = [each / max(sum(own), 1) for each in own]
    return ModelTrace(tuple(map(of, every, shares)), ends)


def _kept_by_blocks(empty: PreTrainedModel, forward: Callable[[], Any]) -> list[int]:
    """Bytes a token that autograd keeps for each block."""
    kept: Storages = {}
    _add(kept, *empty.parameters(), *empty.buffers())
    sizes = list[int]()

    def keep(tensor: Tensor) -> Tensor:
        _add(kept, tensor)
        return tensor

    def count(*_: Any) -> None:
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))

    every = blocks(empty)
    hooks = [
        hook for block in every for hook in (block.register_forward_pre_hook(count), block.register_forward_hook(count))
    ]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    for hook in hooks:
        hook.remove()
    return [(after - before) // META_TOKENS for before, after in zip(sizes[::2], sizes[1::2], strict=True)]


def _trained_on_meta(model: ModelConfig) -> PreTrainedModel:
    """The model as a policy has it, on meta in fp32."""
    empty = build_on_meta(model, META_ATTENTION)
    if model.lora:
        adapt(empty, model.lora, getattr(torch, model.dtype))
    freeze(empty, model.freeze)
    Mixture.of(empty)
    return empty


def _tower_trace(empty: PreTrainedModel, model: ModelConfig) -> tuple[Traced | None, bool, int, int]:
    parts = tower_parts(empty)
    if parts is None:
        return None, False, 0, 0
    sight = Sight(empty, attention.of_tower("varlen"))
    config, dtype = empty.config.vision_config, getattr(torch, model.dtype)
    hidden = torch.zeros(META_TOKENS, config.hidden_size, dtype=dtype, device="meta")
    trained = any(p.requires_grad for block in parts.blocks for p in block.parameters())
    block = parts.blocks[0]
    traced = _trace(empty, lambda: sight.tower.compute_block(block, hidden.requires_grad_(trained), _meta_places()))
    ends = sum(_trace(empty, partial(sight.tower.project, projector, hidden))[0] for projector in parts.projectors)
    ends += trained * dtype.itemsize * parts.embedding.weight[0].numel()  # type: ignore[operator, union-attr, index]  # the patches themselves
    n = len(parts.blocks)
    everything, matmuls, inputs = (n * size for size in traced[:3])
    given = COLOURS * config.patch_size**2 + _layout_bytes(sight)
    return Traced(everything, matmuls, inputs, n, dtype.itemsize * config.hidden_size, traced[3]), trained, ends, given


def _layout_bytes(sight: Sight) -> int:
    """Bytes per patch."""
    side = isqrt(META_TOKENS)
    laid_out = sight.tower.layout(torch.tensor([[1, side, side]]))
    return -(-sum(x.nbytes for x in laid_out.values() if isinstance(x, Tensor)) // META_TOKENS)


def _saved_by_tower(size: ModelSizes, learner: LearnerConfig) -> tuple[dict[str, int], int]:
    """The inputs of a tower's blocks stay on the GPU, and the pixels of the microbatch that is computed."""
    if size.tower is None:
        return {}, 0
    given = learner.activation_checkpointing
    way: str = "none" if isinstance(given, int) else given
    way = "compiled" if learner.compile is True and way in ("none", "selective") else way
    kept, working = _saved(size.tower, way) if size.tower_is_trained else (0, 0)
    images = {"tower": PATCHES_PER_TOKEN * (kept + size.ends_of_tower)}
    return images | {"pixels": PATCHES_PER_TOKEN * size.given_to_tower}, PATCHES_PER_TOKEN * working


def _meta_places() -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device="meta")


def _saved(traced: Traced, way: str) -> tuple[int, int]:
    """For towers, and where backward passes cannot be traced: bytes per token or patch that a stack of blocks keeps,
    and that one block's backward pass takes.

    A recomputed block holds what it would have kept, and gradients of an MLP's two factors, the largest there are.
    """
    everything, matmuls, layers, width = traced.everything, traced.matmuls, traced.layers, traced.width
    working = 3 * matmuls // (2 * layers)
    if way in ("auto", "block", "offload"):
        return (layers + 2) * width, everything // layers + 2 * traced.widest  # 2: what the last norm keeps
    if way == "compiled":
        return min(matmuls + traced.inputs, everything), working
    if way == "selective":
        return min(matmuls + layers * width, everything), working + max(everything - matmuls, 0) // layers
    return everything, working


Storages = dict[int, Tensor]
"""Keys are addresses: views count once, and holding tensors keeps addresses unique."""


def _add(storages: Storages, *tensors: Tensor) -> None:
    storages.update({tensor.untyped_storage()._cdata: tensor for tensor in tensors})


def _trace(empty: PreTrainedModel, forward: Callable[[], Any]) -> tuple[int, int, int, int]:
    """Bytes per token: all; outputs of matmuls and attention; other inputs of matmuls; the largest output."""
    fixed: Storages = {}
    kept: Storages = {}
    _add(fixed, *empty.parameters(), *empty.buffers())

    def keep(tensor: Tensor) -> Tensor:
        _add(kept, tensor)
        return tensor

    sums: Storages = {}
    _add(sums, *(layer.lora_B for layer in empty.modules() if isinstance(layer, Adapted)))
    with _MatmulRecorder(sums) as matmuls, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()

    def per_token(storages: Storages, without: Storages) -> int:
        return sum(x.untyped_storage().nbytes() for key, x in storages.items() if key not in without) // META_TOKENS

    inputs = per_token(matmuls.inputs, fixed | matmuls.outputs)
    widest = max((x.untyped_storage().nbytes() for x in matmuls.outputs.values()), default=0) // META_TOKENS
    return per_token(kept, fixed), per_token(matmuls.outputs, {}), inputs, widest


class _MatmulRecorder(TorchDispatchMode):
    """`added`: matrices whose output is added to another's; the compiler keeps only the sum."""

    def __init__(self, added: Storages) -> None:
        super().__init__()
        self._added = added
        self.inputs: Storages = {}
        self.outputs: Storages = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in MATMULS:
            factors = [x for x in args if isinstance(x, Tensor)]
            _add(self.inputs, *factors)
            if not any(x.untyped_storage()._cdata in self._added for x in factors):
                _add(self.outputs, output)
        elif func is ATTEND:
            _add(self.outputs, *output)
        return output


@contextmanager
def explain_out_of_memory(estimate: Estimate, tokens: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the GPU is full: {str(error).splitlines()[0].partition('. ')[0]}. A rank should take "
            f"{estimate.describe(tokens)}. Lower learner.tokens_per_microbatch ({tokens}), set "
            "learner.activation_checkpointing: block or learner.gather: pass, or raise learner.ranks or learner.shard"
        ) from None
