"""How vLLM's model of a shape takes a policy: `python -m benchmarks.vision.loading FOLDER OUT [FREEZE ...]`.

The model as a worker has it, without an engine; random weights in a staging copy. Timed is each load by the way that
Headrace takes (`rollout/engine/model_load.py`), of everything and of what is trained beside a frozen tower. On a GPU
the other way follows, layer by layer or in place by recorded copies, and whether both leave the very same parameters
and buffers: a model of which they do belongs in `PLAIN_TOWERS`.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from configs.inner_command import inner_words
from configs.schema import ModelConfig
from learner.model.attention import registered
from learner.model.loading import build_on_meta
from learner.model.vision import freeze as freeze_parts
from learner.weights.buckets import Buckets
from learner.weights.plan import Plan, Spec
from rollout.engine.arguments import environment

POLICIES = 4
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")


def staging_of(folder: str, freeze: list[Any]) -> Buckets:
    """A staging copy as the learner's plan lays it out."""
    empty = build_on_meta(ModelConfig(path=folder), registered("sdpa"))
    freeze_parts(empty, freeze)
    specs = [Spec(name, tuple(p.shape), torch.bfloat16) for name, p in empty.named_parameters()]
    frozen = frozenset(name for name, p in empty.named_parameters() if not p.requires_grad)
    return Buckets(Plan.of(specs, 1 << 30, frozen), DEVICE)


def refill(staged: Buckets, seed: int, first: int) -> None:
    """The next policy, in place, from bucket `first` on."""
    draw = torch.Generator(DEVICE).manual_seed(seed)
    for _, tensor in staged.views(first=first):
        tensor.normal_(std=0.02, generator=draw)


def model_of(folder: str, stack: ExitStack) -> tuple[Any, Any]:
    """vLLM's model and its config, in process groups of this process alone."""
    from vllm import EngineArgs
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    store = stack.enter_context(tempfile.TemporaryDirectory())
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}/store", 0, "nccl" if GPU else "gloo")
        ensure_model_parallel_initialized(1, 1)
    room: dict[str, Any] = {} if GPU else {"kv_cache_memory_bytes": 1 << 26}
    made: Any = EngineArgs(folder, enforce_eager=True, load_format="dummy", dtype="bfloat16", max_model_len=512,
                           limit_mm_per_prompt={"image": 1, "video": 0}, **room).create_engine_config()  # fmt: skip
    with set_current_vllm_config(made):
        if GPU:
            return get_model_loader(made.load_config).load_model(made, made.model_config), made
        torch.set_default_dtype(torch.bfloat16)
        model: Any = initialize_model(made)  # vLLM's loaders want an accelerator
        process_weights_after_loading(model, made.model_config, DEVICE)
        torch.set_default_dtype(torch.float32)
        return model, made


def seconds(work: Callable[[], object]) -> float:
    """Until the GPU has done `work`."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize(DEVICE)


def state(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers."""
    return {name: x.detach().clone() for name, x in [*model.named_parameters(), *model.named_buffers()]}


def way_of(load: Any) -> str:
    """By which way it loads."""
    if not load.plainly:
        return "vLLM's layerwise reload"
    problem = load._copies.recording.problem
    return f"vLLM's load_weights: {problem}" if problem else "recorded copies"


def times_of(load: Any, staged: Buckets) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Seconds of each policy's load, the frozen weights with the first one only; and what is in the model after the
    first and the last."""
    spent, after = [], dict[str, torch.Tensor]()
    for seed in range(POLICIES):
        first = staged.plan.frozen if seed else 0
        refill(staged, seed, first)
        spent.append(seconds(partial(load.load_staged, staged.views(first=first))))
        if seed in (0, POLICIES - 1):
            after |= {f"{name} of policy {seed}": x for name, x in state(load.model).items()}
    return spent, after


def main(folder: str, freeze: list[str]) -> dict[str, Any]:
    """Load some policies each way."""
    from rollout.engine.model_load import ModelLoad

    found: dict[str, Any] = {}
    with ExitStack() as stack:
        model, config = model_of(folder, stack)
        for kind, parts in (("trained", list[str]()), ("frozen", freeze)):
            staged, times, states = staging_of(folder, parts), dict[str, list[float]](), list[dict[str, torch.Tensor]]()
            for other in (False, True) if GPU else (False,):  # a CPU packs its layers, so in place would be wrong
                load = ModelLoad(model, config, DEVICE)
                load.frozen, load.plainly = staged.plan.frozen_names, load.plainly != other
                spent, after = times_of(load, staged)
                times[way_of(load)] = spent
                states.append(after)
            size = sum(slot.size for slot in staged.plan.slots if slot.bucket >= staged.plan.frozen)
            found[kind] = {"times": times, "bytes": size, "same": same(*states) if len(states) > 1 else None}
    return found


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    """What differs, in words; empty if nothing does."""
    if ours.keys() != theirs.keys():
        return f"{min(ours.keys() ^ theirs.keys())} is in one only"
    other = [name for name, x in ours.items() if not torch.equal(x, theirs[name])]
    return f"{len(other)} of {len(ours)} tensors differ, {min(other)} among them" if other else ""


def rows_of(found: dict[str, Any], shape: str) -> Any:
    """Each way's times, that of Headrace first."""
    from benchmarks.weights.table import ResultRow

    case = f"loading: {shape}, vLLM's model alone"
    for kind, each in found.items():
        first: float | None = None
        for way, times in each["times"].items():
            what = f"a policy, {'tower trained' if kind == 'trained' else 'tower frozen'}, by {way}"
            usual = 1e3 * median(times[1:])
            against = ("the way that is taken", first) if first is not None else ("the first one", 1e3 * times[0])
            yield ResultRow(what, usual, "ms", against[0], against[1], case)
            first = first or usual
        if each["same"] is not None:
            words = each["same"] or "nothing differs"
            yield ResultRow("  both leave the same parameters and buffers", float(not each["same"]), "", words, 1, case)


if __name__ == "__main__":
    inner_words("FOLDER", "OUT", further="FREEZE")
    for key, value in environment(not GPU).items():
        os.environ.setdefault(key, value)
    given, out, *parts = sys.argv[1:]
    result = main(given, parts)
    part = Path(out).with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(out)
    sys.stdout.flush()
    os._exit(0)
