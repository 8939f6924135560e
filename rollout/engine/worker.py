"""What Headrace adds to each vLLM worker: it stamps what is sampled with the version of the weights, receives weights
while it generates, and loads them between two steps.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and runs its methods in the worker process
between two engine steps; `vllm_engine.py` calls them with `Engine.collective`. Methods and attributes begin with `rl_`,
so as not to shadow vLLM's.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from learner.weights.channel import ChannelError, backend_of
from learner.weights.receiver.staging import Staging

RELOADING = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
RELOADING.setLevel(logging.ERROR)  # it warns of layers without weights at each update; see `check_complete`
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Layers whose weights a GPU keeps as they are in the file: loading over them is enough."""


class WorkerExtension:
    """Mixed into vLLM's worker, of which it uses `device`, `rank`, `model_runner`, `vllm_config` and `model_config`."""

    device: torch.device
    rank: int
    model_runner: Any
    vllm_config: Any
    model_config: Any
    rl_staging: Staging | None = None
    rl_version: int | None = None

    def rl_describe(self) -> dict[str, str]:
        """The backend this worker receives with."""
        return {"backend": backend_of(self.device)}

    def rl_ping(self) -> float:
        """This process's `time.monotonic`. An answer shows that the engine is not stuck."""
        return time.monotonic()

    def rl_stamp(self, version: int) -> None:
        """From the next step on, what is sampled is `version`'s. Called once before anything is generated."""
        if self.rl_version is None:
            sample = self.model_runner.sample_tokens
            self.model_runner.sample_tokens = lambda grammar_output: stamped(sample(grammar_output), self.rl_version)
        self.rl_version = version

    def rl_prepare(self, welcome: bytes, staging: str) -> tuple[str, str]:
        """Allocate a staging copy or two buckets; returns the plan's digest, and `full` or `bucket`."""
        if self.rl_staging is None:
            self.rl_staging = Staging(self.device, self.rank, self._rl_stream)
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
        """Load the staged `version`, which samples from the next step on. Nothing waits for the GPU: the copies come
        behind the steps that are on their way there."""
        assert self.rl_staging is not None
        self._rl_load(self.rl_staging.weights(version))
        self.rl_stamp(version)

    def rl_load_folder(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder, under the version of those before."""
        self._rl_load(tensors_in(files_in(Path(folder))))

    def _rl_stream(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load `weights` as they arrive in buckets that later ones overwrite. The engine is paused.

        Runs in the staging's thread. Raises ChannelError if they end early and another round can repair that.
        """
        model = self.model_runner.get_model()
        if loads_plainly(model, self.vllm_config, self.device):
            self._rl_load(weights)
            return
        try:
            # cloned, because vLLM keeps them until a layer is complete
            self._rl_load((name, tensor.clone()) for name, tensor in weights)
        except ChannelError as error:
            raise RuntimeError(f"vLLM's layers are half rebuilt, so this server has to restart: {error}") from error

    @torch.no_grad()
    def _rl_load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        with ExitStack() as stack:
            stack.enter_context(set_current_vllm_config(self.vllm_config))
            stack.enter_context(torch.device(self.device))
            if loads_plainly(model, self.vllm_config, self.device):
                loaded = model.load_weights(iter(weights))
            else:
                initialize_layerwise_reload(model)
                loaded = model.load_weights(iter(weights))
                finalize_layerwise_reload(model, self.model_config)  # type: ignore[no-untyped-call]
                repack_head(model)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        check_complete(expected, loaded, self.model_config)


class StampedOutput(AsyncModelRunnerOutput):
    """A step's output that is still on the GPU: whoever takes it gets it with the version that it was launched with."""

    def __init__(self, output: AsyncModelRunnerOutput, version: int | None) -> None:
        self.output, self.version = output, version

    def get_output(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = stamped(self.output.get_output(), self.version)
        return output


def stamped(output: Any, version: int | None) -> Any:
    """The output of `sample_tokens`, with `rl_version` for `scheduler.py`. The weights of a step do not change between
    its launch, which this follows at once, and its run; but its tokens may be taken after the next version is loaded.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        return StampedOutput(output, version)
    if isinstance(output, ModelRunnerOutput):  # neither from ranks without an output nor between pipeline stages
        output.rl_version = version  # type: ignore[attr-defined]
    return output


def loads_plainly(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> bool:
    """Whether `load_weights` may overwrite the weights in place. Otherwise vLLM's layerwise reload is needed.

    Plain loading takes a fifth of the time, and is correct only where vLLM keeps every weight as it is in the file: on
    a GPU, unquantised, linear and embedding layers only. Experts are rearranged for their kernels and would be
    corrupted silently; latent attention (MLA) keeps matrices derived from its weights; a CPU packs linear layers. The
    rule looks at the loaded model's own layers, and every update is verified by checksums before and by the probe
    after.
    """
    if device.type != "cuda" or vllm_config.quant_config is not None:
        return False
    modules = list(model.modules())
    methods = {type(method).__name__ for m in modules if (method := getattr(m, "quant_method", None)) is not None}
    return methods <= set(PLAIN_METHODS) and not any("MLA" in type(module).__name__ for module in modules)


def repack_head(model: torch.nn.Module) -> None:
    """Pack a tied head on a CPU anew: it holds a packed copy of the embedding that vLLM's reload does not update."""
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and type(layer).__name__ == "ParallelLMHead":
            layer.quant_method.process_weights_after_loading(layer)


def check_complete(expected: set[str], loaded: object, model_config: Any) -> None:
    """Raise ValueError if some weights of vLLM's model were not loaded. Models that do not report what they loaded
    pass."""
    if not isinstance(loaded, set) or model_config.quantization is not None:
        return
    missing = expected - loaded
    if getattr(model_config.hf_text_config, "tie_word_embeddings", False):
        missing = {name for name in missing if not name.endswith("lm_head.weight")}
    if missing:
        raise ValueError(f"{len(missing)} weights of vLLM's model were not received, {min(missing)} among them")


def files_in(folder: Path) -> list[Path]:
    """The safetensors files of `folder`. Raises FileNotFoundError if there are none, before anything is loaded."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no .safetensors file in it")
    return files


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of `files` by name."""
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
