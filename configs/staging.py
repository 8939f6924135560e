"""What a server's worker needs beside vLLM for its next version. The workers measure the same at a learner's plan
(`learner/weights/receiver/staging.py`)."""

from collections.abc import Iterator
from typing import NamedTuple

from configs.expert_models import KEPT_WHOLE, is_loaded_in_place
from configs.model_facts import BYTES, facts_of
from configs.publishing import GROUP_BYTES, publishes_rows, shards_of
from configs.schema import Config

LARGER = 4
"""With several ranks that send, buckets grow at most so many times: each message costs operations of a thread that
waits for the GIL, each bucket memory."""


class Room(NamedTuple):
    """Bytes for all weights, for what a worker loads, and for buckets loaded one by one. The last includes the clones
    of weights that the model's loader keeps."""

    full: int
    slices: int
    bucket: int


def room(config: Config) -> Room | None:
    """A tensor larger than a bucket is a bucket."""
    facts, ranks = facts_of(config.model), shards_of(config)
    saved = (facts.saved_parameters(config.model) or 0) * BYTES[config.model.dtype]
    if not saved:
        return None
    rows = publishes_rows(config, ranks)
    share = config.weights.bucket_mib << 20
    bucket = min(share * (min(ranks, LARGER) if rows else 1), saved)
    # a share arrives in one of two buffers, and one bucket is made of shares
    arrival = 2 * (bucket // ranks) if rows else 0
    groups = (ranks - 1) * GROUP_BYTES if rows else 0
    passing = bucket + arrival if rows else min(2 * bucket, saved)
    full = saved + arrival + groups
    slices = saved // config.rollout.tensor_parallel + passing + groups
    cloned = saved if facts.kind in KEPT_WHOLE and not config.model.lora else 0
    return Room(full, slices, min(2 * bucket, saved) + arrival + groups + cloned)


def contradictions(config: Config) -> Iterator[str]:
    if config.weights.staging != "slices":
        return
    quantized, facts = config.rollout.engine.get("quantization"), facts_of(config.model)
    whys = {
        "model.lora is set, and an adapter is loaded from whole tensors": config.model.lora is not None,
        "rollout.device is cpu, where vLLM rebuilds layers from whole tensors": config.rollout.device == "cpu",
        f"rollout.engine.quantization is {quantized}, which is computed from whole tensors": quantized is not None,
        "the model has experts, which vLLM rebuilds from whole tensors": facts.experts
        and not is_loaded_in_place(facts.kind),
    }
    for why, holds in whys.items():
        if holds:
            yield f"weights.staging: slices, but {why}; set auto"


def lines(config: Config) -> Iterator[str]:
    needs, wanted = room(config), config.weights.staging
    if needs is None or config.rollout.device == "cpu":
        return
    sizes = {mode: f"{size / 1e9:.3g} GB" for mode, size in needs._asdict().items()}
    sliceable = config.rollout.tensor_parallel > 1 and needs.slices < needs.full and not config.model.lora
    size = sizes["full" if wanted == "auto" else wanted]
    if wanted == "auto" and sliceable:
        size += f", or {sizes['slices']} if it can stage what it loads only,"
    less = wanted == "auto" and needs.bucket < needs.full
    paused = f"; {sizes['bucket']} are enough for weights.staging: bucket, which pauses" if less else ""
    yield f"staging: each worker of a server takes about {size} beside vLLM for the next version{paused}"
