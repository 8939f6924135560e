"""An engine on a GPU beside a sender in this process on the same GPU: NCCL refuses two ranks of one host on one GPU,
so each says that it is on a host of its own, and they communicate through sockets."""

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.weights.sharing import as_host
from configs.schema import Config

GPU_ENGINE: dict[str, Any] = {"gpu_memory_utilization": 0.3, "max_cudagraph_capture_size": 64}
"""vLLM wants so much of the GPU to be free, of which earlier tests have left it a part. Few graphs start sooner."""


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """With these environment variables inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})


@contextmanager
def nothing_left() -> Iterator[None]:
    """For an engine and a sender that share the GPU inside; what vLLM leaves behind is collected."""
    with warnings.catch_warnings(), variables(**as_host("learner")):
        warnings.simplefilter("ignore", ResourceWarning)  # vLLM leaves a ZeroMQ context to the garbage collector
        yield
        gc.unfreeze()  # `Engine.launch` froze what it found
        gc.collect()


def device_of(config: Config) -> torch.device:
    """Where the sender beside such an engine holds its copies: its stream wants a GPU's number."""
    return torch.device("cpu") if config.rollout.device == "cpu" else torch.device("cuda", 0)


async def start(config: Config) -> Any:
    """`Engine.start`, on a GPU in processes that NCCL takes for another host's."""
    from rollout.engine.vllm_engine import Engine  # vLLM takes seconds to import

    host = {} if config.rollout.device == "cpu" else as_host("server")
    with variables(**host):
        return await Engine.start(config, seed=1)
