"""Prepares a learner's process: device, threads, and the fastest settings that fit its memory."""

import logging
import os
from functools import partial
from importlib.util import find_spec

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils import logging as transformers_logging

from buffer.data.images import ImageFormat
from configs.critic import keeps_critic
from configs.load import ConfigError
from configs.publishing import copies_over
from configs.schema import Config
from learner.mesh import on_every_rank, ranks_of_node, shards
from learner.model import attention, float8, loading, speed, state
from learner.model.experts.mixture import check_experts
from learner.model.gather_choice import choose_gather, gathers, place_of
from learner.model.memory import (
    Estimate,
    RankRoom,
    gpu_memory,
    is_single,
    least_microbatch,
    memory_budget,
    share_of_batch,
    sizes_of,
)
from learner.model.settled import keeps_reference
from learner.train import collectives

log = logging.getLogger("learner")


def choose_device(config: Config) -> torch.device:
    """The type of device, without touching it. Raises ConfigError."""
    model, learner, gpus = config.model, config.learner, torch.cuda.device_count()
    device = torch.device("cuda" if learner.device == "cuda" or (learner.device == "auto" and gpus) else "cpu")
    local_ranks = ranks_of_node(learner, learner.ranks, os.environ)
    if device.type == "cuda" and gpus < local_ranks:
        problem = f"learner.ranks: {local_ranks} ranks need {local_ranks} GPUs, {gpus} are seen"
        raise ConfigError([f"{problem}; lower it, or set learner.device: cpu"])
    known = loading.read_config(model)
    attention.choose(learner.attention, device, getattr(torch, model.dtype), known)
    check_experts(known, model.path, config.rollout.routing_replay)
    float8.check_device(learner, device)
    return device


def image_format(config: Config) -> ImageFormat | None:
    """How the model sees images; None for a text model. Raises ConfigError if it cannot be trained with them."""
    form, path = ImageFormat.of_run(config), config.model.path
    if form is not None and find_spec("transformers.vision_utils") is None:
        problem = f"{path} is a vision-language model, which needs transformers 5.16 or later"
        raise ConfigError([f"model.path: {problem}, and {transformers.__version__} is installed; upgrade it"])
    return form


def configure_process(config: Config, device: torch.device) -> torch.device:
    """Set threads, seed and GPU. Raises ConfigError."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if config.learner.threads or device.type == "cpu":
        torch.set_num_threads(config.learner.threads or max(torch.get_num_threads() // local_ranks, 1))
    torch.manual_seed(config.run.seed)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if device.type == "cpu":
        state.use_torch_alone()
    else:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # microbatches differ in length
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        attention.choose(config.learner.attention, device, getattr(torch, config.model.dtype))  # also loads the kernel
        float8.check_device(config.learner, device)
    return device


def decide_speed(config: Config, memory: int | None, mesh: DeviceMesh, patches: int) -> Config:
    """Decide `learner.compile`, `activation_checkpointing` and `head_chunk_tokens`. A collective: GPUs may differ.
    `memory`: bytes of this rank's GPU. `patches`: the most of one sample. Raises ConfigError, on every rank."""
    written, versions, on_gpu = config.learner, config.run.versions, memory is not None
    room = room_of(config, memory, mesh, patches)
    automatic = written.model_copy(update={"compile": "auto", "activation_checkpointing": "auto"})
    blocks, decided = len(on_every_rank(partial(sizes_of, config.model)).of_blocks), []
    for learner in (written, automatic):
        ways = speed.fastest_first(learner, on_gpu, versions, blocks)
        decided.append((ways, on_every_rank(partial(speed.choose, config.model, ways, room))))
    agreed = collectives.all_reduce_max(*(index for _, index in decided))
    chosen, best = (ways[int(index)] for (ways, _), index in zip(decided, agreed, strict=True))
    speed.report(written, chosen, on_gpu, versions, room.tokens, blocks)
    speed.report_slower(written, chosen, best, blocks)
    return config.model_copy(update={"learner": chosen})


def decide_gather(config: Config, device: torch.device, mesh: DeviceMesh, patches: int) -> Config:
    """Decide `learner.gather: auto`. Raises ConfigError, on every rank. A collective."""
    room = room_of(config, gpu_memory(device), mesh, patches)
    share, blocks = share_of_batch(config, patches), len(sizes_of(config.model).of_blocks)
    single = all_single(config, device, mesh, room.reference, room.sends, patches)
    own = on_every_rank(partial(choose_gather, config.model, config.learner, room, share, single))
    place = place_of(own.gather, blocks)
    (least,) = collectives.all_reduce_max(-place)
    if -least < place:
        gather = gathers(blocks)[-int(least)]
        log.info("learner.gather: %s, as another rank has no room for %s", gather, own.gather)
        own = own.model_copy(update={"gather": gather})
    return config.model_copy(update={"learner": own})


def room_of(config: Config, memory: int | None, mesh: DeviceMesh, patches: int) -> RankRoom:
    sends = copies_over(config, shards(mesh), mesh.get_rank())
    least = least_microbatch(config, patches)
    return RankRoom(shards(mesh), memory, least, keeps_reference(config), sends, keeps_critic(config))


def all_single(
    config: Config, device: torch.device, mesh: DeviceMesh, reference: bool, sends: int, patches: int
) -> bool:
    """Whether a batch is one microbatch on every rank. A collective. Raises ConfigError, on every rank."""
    sizes = config, gpu_memory(device), shards(mesh), reference, sends, patches
    (several,) = collectives.all_reduce_max(not on_every_rank(partial(is_single, *sizes)))
    return not several


def decide_budget(
    config: Config, device: torch.device, mesh: DeviceMesh, reference: bool, sends: int, patches: int
) -> tuple[Estimate, int]:
    """Estimate this rank's memory, and decide the tokens of every rank's microbatches: as many as all have room for.
    Raises ConfigError, on every rank. A collective."""
    single = all_single(config, device, mesh, reference, sends, patches)
    given = config, device, shards(mesh), reference, sends, patches, single
    expected, own = on_every_rank(partial(memory_budget, *given))
    (least,) = collectives.all_reduce_max(-own)
    budget = int(-least)
    if budget < own:
        log.info("%d tokens per microbatch: the GPU of another rank has room for no more", budget)
    return expected, budget
