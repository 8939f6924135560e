"""How many sequences a server's KV cache will hold, estimated before it starts."""

import shutil
import subprocess
from typing import NamedTuple

from configs.flow.sequences import mean_tokens
from configs.model_facts import BYTES, model_facts
from configs.schema import Config

KEY = "rollout.engine.kv_cache_memory_bytes"
CPU_KV_BYTES = 256 << 20
UTILIZATION = 0.92
"""vLLM's own default."""
HALF_A_BLOCK = 8
"""Unused tokens of a sequence's last block, in the mean."""


class KvRoom(NamedTuple):
    """Sequences of the mean length, and how that is known."""

    sequences: int | None
    basis: str
    tokens: int | None = None


def kv_room(
    config: Config, gpu_bytes: int | None, card: str = "as this machine's", parameters: int | None = None
) -> KvRoom:
    """Each GPU holds its share of the heads. A shared prompt counts for each sample.

    `gpu_bytes`: memory of a GPU that serves, which `card` describes. `parameters`: for a model.path without weights.
    """
    facts, given = model_facts(config.model.path), config.rollout.engine
    room, shards = given.get("kv_cache_memory_bytes"), config.rollout.tensor_parallel
    parameters = facts.parameters or parameters or 0
    if room is not None:
        basis = f"{KEY} {room}"
    elif config.rollout.device == "cpu":
        room, basis = CPU_KV_BYTES, f"{CPU_KV_BYTES >> 20} MiB on a CPU"
    elif gpu_bytes is None:
        on_cpu = f"; on a CPU it is {CPU_KV_BYTES >> 20} MiB" if config.rollout.device == "auto" else ""
        return KvRoom(None, f"not known: this machine has no GPU, and the run file no {KEY}{on_cpu}")
    else:
        share = given.get("gpu_memory_utilization", UTILIZATION)
        weights = parameters * BYTES[config.model.dtype] // shards
        room = share * gpu_bytes - weights if isinstance(share, int | float) else None
        less = f"less {weights / 1e9:.3g} GB of weights, nothing taken off for activations and CUDA graphs"
        basis = f"a GPU {card}, {gpu_bytes / 1e9:.3g} GB x {share}, {less}"
    if not (facts.kv_numbers and facts.kv_heads and parameters and isinstance(room, int | float)):
        path = config.model.path
        why = f"model.path {path} tells nothing of a token's size" if parameters else f"no weights of {path} are here"
        return KvRoom(None, f"not known, because {why}")
    width = 1 if str(given.get("kv_cache_dtype")).startswith("fp8") else BYTES[config.model.dtype]
    token = width * facts.kv_numbers / min(shards, facts.kv_heads)
    held = max(0.0, room / token)
    return KvRoom(int(held / (mean_tokens(config) + HALF_A_BLOCK)), basis, int(held))


def gpu_bytes() -> int | None:
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(word) << 20 for word in done.stdout.split() if word.isdigit()] if done.returncode == 0 else []
    return min(sizes, default=None)
