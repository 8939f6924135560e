"""What Headrace adds to each vLLM worker: it receives weights while it generates, and loads them while it is paused.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and runs its methods in the worker process
between two engine steps; `vllm_engine.py` calls them with `Engine.collective`. Methods and attributes begin with `rl_`,
so as not to shadow vLLM's. None waits for the GPU.
"""

import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from learner.weights.channel import backend_of
from learner.weights.receiver.staging import Staging
from rollout.engine.model_load import ModelLoad


class WorkerExtension:
    """Mixed into vLLM's worker, of which it uses `device`, `rank`, `model_runner` and `vllm_config`."""

    device: torch.device
    rank: int
    model_runner: Any
    vllm_config: Any
    rl_staging: Staging | None = None

    @cached_property
    def rl_model(self) -> ModelLoad:
        """How weights get into this worker's model."""
        return ModelLoad(self.model_runner.get_model(), self.vllm_config, self.device)

    def rl_describe(self) -> dict[str, str]:
        """The backend this worker receives with."""
        return {"backend": backend_of(self.device)}

    def rl_ping(self) -> float:
        """This process's `time.monotonic`. An answer shows that the engine is not stuck."""
        return time.monotonic()

    def rl_prepare(self, welcome: bytes, staging: str) -> tuple[str, str]:
        """Allocate a staging copy or two buckets; returns the plan's digest, and `full` or `bucket`."""
        if self.rl_staging is None:
            self.rl_staging = Staging(self.device, self.rank, self.rl_model.stream)
        self.rl_model.forget_staged()  # its memory may be needed for another one
        return self.rl_staging.prepare(welcome, staging)

    def rl_receive(self, go: bytes, notify: str) -> None:
        """Start to receive in the background."""
        assert self.rl_staging is not None
        self.rl_staging.receive(go, notify)

    def rl_abort(self) -> None:
        """Stop receiving."""
        if self.rl_staging is not None:
            self.rl_staging.abort()

    def rl_load(self, version: int) -> None:
        """Load the staged `version` behind the step under way, without waiting for either."""
        assert self.rl_staging is not None
        self.rl_model.load_staged(self.rl_staging.weights(version))
        if self.device.type == "cuda":
            self.rl_staging.read_until(torch.cuda.current_stream(self.device).record_event())

    def rl_load_folder(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder."""
        self.rl_model.load_folder(Path(folder))
