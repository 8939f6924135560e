"""Headrace's part of each vLLM worker: stamps samples with versions, receives weights while it generates, and loads
them between two steps.

vLLM mixes `WorkerExtension` into its worker class. Names begin with `rl_`, so as not to shadow vLLM's. No method waits
for the GPU.
"""

import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from learner.weights.channel import backend_of
from learner.weights.receiver.staging import Staging
from rollout.engine.door.vllm_worker import AsyncModelRunnerOutput, ModelRunnerOutput
from rollout.engine.exact_layers import ExactLayers
from rollout.engine.experts.expert_kernels import needs_trial, refusal
from rollout.engine.experts.trial_weights import TrialWeights, cannot_be_tried
from rollout.engine.lora.adapter_load import AdapterLoad
from rollout.engine.model_load import ModelLoad
from rollout.engine.start_failure import report_final_failures

report_final_failures()  # vLLM's engine process imports this module before it builds the model


class WorkerExtension(ExactLayers):
    """Uses `device`, `rank`, `model_runner` and `vllm_config` of vLLM's worker."""

    device: torch.device
    rank: int
    model_runner: Any
    vllm_config: Any
    rl_staging: Staging | None = None
    rl_version: int | None = None

    @cached_property
    def rl_model(self) -> ModelLoad | AdapterLoad:
        if self.vllm_config.lora_config is not None:
            return AdapterLoad(self.model_runner.lora_manager, self.vllm_config.model_config.model, self.device)
        return ModelLoad(self.model_runner.get_model(), self.vllm_config, self.device)

    def rl_refusal(self) -> str:
        """Return why this model cannot be given policies, or ""."""
        model = self.model_runner.get_model()
        tried = needs_trial(model, self.vllm_config)
        return refusal(model, self.vllm_config) or (cannot_be_tried(self.vllm_config.model_config) if tried else "")

    def rl_trial_kinds(self) -> list[str]:
        """Return kinds of weights whose loads must be tried."""
        needed = needs_trial(self.model_runner.get_model(), self.vllm_config)
        return self.rl_trial_weights.kinds() if needed else []

    @cached_property
    def rl_trial_weights(self) -> TrialWeights:
        return TrialWeights(self.vllm_config.model_config, self.device)

    def rl_load_trial(self, changed: str) -> None:
        assert isinstance(self.rl_model, ModelLoad)
        self.rl_model.load_trial(self.rl_trial_weights.tensors(changed))

    def rl_describe(self) -> dict[str, str]:
        return {"backend": backend_of(self.device)}

    def rl_ping(self) -> float:
        """Shows that the engine is not stuck."""
        return time.monotonic()

    def rl_stamp(self, version: int) -> None:
        """First called before anything is generated."""
        if self.rl_version is None:
            sample = self.model_runner.sample_tokens
            self.model_runner.sample_tokens = lambda grammar_output: stamped(sample(grammar_output), self.rl_version)
            if self.device.type == "cpu" and self.vllm_config.model_config.enforce_eager:  # vLLM's sampler does not ask
                torch.compiler.set_stance("force_eager")
        self.rl_version = version

    def rl_register(self) -> None:
        assert isinstance(self.rl_model, AdapterLoad)
        self.rl_model.register()

    def rl_prepare(self, welcome: bytes, staging: str) -> tuple[str, str, str]:
        """Allocate a staging copy or buckets; return the plans' digests, and `full`, `slices` or `bucket`."""
        if self.rl_staging is None:
            self.rl_staging = Staging(self.device, self.rank, self.rl_model.stream, self.rl_model.regions)
        self.rl_model.forget_staged()
        prepared = self.rl_staging.prepare(welcome, staging)
        self.rl_model.frozen = self.rl_staging.frozen
        return prepared

    def rl_receive(self, go: bytes, notify: str) -> None:
        assert self.rl_staging is not None
        self.rl_staging.receive(go, notify)

    def rl_abort(self) -> bool:
        """Stop receiving. Return whether the buckets are free; if not, the next report frees them."""
        return self.rl_staging is None or self.rl_staging.abort()

    def rl_load(self, version: int) -> None:
        """Load the staged `version`, which samples from the next step on."""
        assert self.rl_staging is not None
        if self.rl_staging.mode == "slices":
            assert isinstance(self.rl_model, ModelLoad)
            self.rl_model.load_slices(self.rl_staging.slices(version))
        else:
            self.rl_model.load_staged(self.rl_staging.weights(version))
        if self.device.type == "cuda":
            self.rl_staging.read_until(torch.cuda.current_stream(self.device).record_event())
        self.rl_stamp(version)

    def rl_load_folder(self, folder: str) -> None:
        self.rl_model.load_folder(Path(folder))


class StampedOutput(AsyncModelRunnerOutput):
    """A step's output on the GPU, with the version that it was launched with."""

    def __init__(self, output: AsyncModelRunnerOutput, version: int | None) -> None:
        self.output, self.version = output, version

    def get_output(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = stamped(self.output.get_output(), self.version)
        return output

    def get_kv_connector_output(self) -> Any:
        """vLLM 0.33 asks for it after a failed step."""
        output: Any = self.output
        return output.get_kv_connector_output()


def stamped(output: Any, version: int | None) -> Any:
    """Give the output its `rl_version`: its tokens may be taken after the next load."""
    if isinstance(output, AsyncModelRunnerOutput):
        return StampedOutput(output, version)
    if isinstance(output, ModelRunnerOutput):
        output.rl_version = version  # type: ignore[attr-defined]
    return output
