"""What Headrace adds to each vLLM worker: receiving weights while it generates, and loading them while it is paused.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and runs its methods in the worker
process, between two steps of the engine; `rollout/engine/vllm_engine.py` calls them with `Engine.collective`. Methods and
attributes begin with `rl_`, as vLLM's own names must not be hidden. Nothing here waits, but `rl_load` for the GPU.
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

from learner.weights.channel import ChannelError, backend_of
from learner.weights.receiver.staging import Staging

RELOADING = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
RELOADING.setLevel(logging.ERROR)  # at each update it warns of layers that own no weights; see `check_complete`
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Layers whose weights stay on a GPU as they are in the file: loading over them is all it takes."""


class WorkerExtension:
    """Mixed into vLLM's worker, whose `device`, `rank`, `model_runner`, `vllm_config` and `model_config` it uses."""

    device: torch.device
    rank: int
    model_runner: Any
    vllm_config: Any
    model_config: Any
    rl_staging: Staging | None = None

    def rl_describe(self) -> dict[str, str]:
        """How this worker can receive."""
        return {"backend": backend_of(self.device)}

    def rl_ping(self) -> float:
        """The time here (`time.monotonic`): the engine is not stuck."""
        return time.monotonic()

    def rl_prepare(self, welcome: bytes, staging: str) -> tuple[str, str]:
        """Make room for a staging copy or two buckets; returns the plan's digest, and `full` or `bucket`."""
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

    def rl_load(self, version: int) -> float:
        """Put the staged `version` in place; returns seconds. The engine must be paused."""
        assert self.rl_staging is not None
        return self._rl_load(self.rl_staging.weights(version))

    def rl_load_folder(self, folder: str) -> float:
        """Put the weights of a Hugging Face folder in place; returns seconds. The engine must be paused."""
        return self._rl_load(tensors_in(files_in(Path(folder))))

    def _rl_stream(self, weights: Iterator[tuple[str, torch.Tensor]]) -> float:
        """Put `weights` in place as they arrive, in buckets that are overwritten by later ones. The engine is paused.

        Runs in the staging's thread. Raises ChannelError if they end early and another try can mend it.
        """
        model = self.model_runner.get_model()
        if loads_plainly(model, self.vllm_config, self.device):
            return self._rl_load(weights)
        try:
            return self._rl_load((name, tensor.clone()) for name, tensor in weights)  # kept until a layer is whole
        except ChannelError as error:
            raise RuntimeError(f"vLLM's layers are half rebuilt, only a new start helps: {error}") from error

    @torch.no_grad()
    def _rl_load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> float:
        started = time.perf_counter()
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
        return time.perf_counter() - started


def loads_plainly(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> bool:
    """May `load_weights` simply write over the weights in place? Else vLLM's layerwise reload is needed.

    Plain loading takes a fifth of the time, and is right only where vLLM keeps every weight as it is in the file: on
    a GPU, not quantised, linear and embedding layers only. Experts are rearranged for their kernels and would be
    corrupted without a word; latent attention (MLA) keeps matrices derived from its weights; on a CPU linear layers
    are packed. The rule is judged by what the loaded model is made of, and every update is checked by checksums
    before and by the probe after.
    """
    if device.type != "cuda" or vllm_config.quant_config is not None:
        return False
    modules = list(model.modules())
    methods = {type(method).__name__ for m in modules if (method := getattr(m, "quant_method", None)) is not None}
    return methods <= set(PLAIN_METHODS) and not any("MLA" in type(module).__name__ for module in modules)


def repack_head(model: torch.nn.Module) -> None:
    """A tied head on a CPU holds a packed copy of the embedding, which no reload renews: renew it."""
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and type(layer).__name__ == "ParallelLMHead":
            layer.quant_method.process_weights_after_loading(layer)


def check_complete(expected: set[str], loaded: object, model_config: Any) -> None:
    """Raise ValueError if vLLM's model has weights that did not come. Models that do not say what they loaded pass."""
    if not isinstance(loaded, set) or model_config.quantization is not None:
        return
    missing = expected - loaded
    if getattr(model_config.hf_text_config, "tie_word_embeddings", False):
        missing = {name for name in missing if not name.endswith("lm_head.weight")}
    if missing:
        raise ValueError(f"{len(missing)} weights of vLLM's model did not come, {min(missing)} among them")


def files_in(folder: Path) -> list[Path]:
    """The safetensors files of `folder`. Raises FileNotFoundError where there are none: now, not in mid-load."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no .safetensors file in it")
    return files


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of `files`, by name."""
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
