"""Loads a policy into vLLM's model: from the staging copy, bucket by bucket, or from files.

The worker calls this between two engine steps; `stream` runs in the staging's thread while the engine is paused. Loads
are queued on the steps' stream, so nothing waits for the GPU. vLLM's reload leaves whole layers as they are; a layer of
which only a part comes becomes garbage.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from learner.weights.channel import ChannelError
from learner.weights.plan import Spec
from learner.weights.slices import Region, Regions
from rollout.engine.door.leant_on import RELOAD_LOGGER
from rollout.engine.door.vllm_worker import (
    LinearBase,
    RoutedExperts,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    set_current_vllm_config,
)
from rollout.engine.experts.expert_kernels import METHOD, loads_in_place, packed_anew, parameter_name
from rollout.engine.read_weights import ReadWeights
from rollout.engine.recorded_copies import RecordedCopies
from rollout.engine.region_copies import RegionCopies
from rollout.engine.written_bytes import WrittenBytes

RELOADING = logging.getLogger(RELOAD_LOGGER)
RELOADING.setLevel(logging.ERROR)  # it warns at each update; see `check_complete`
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Layers whose weights a GPU keeps as they are in the file."""
PLAIN_TOWERS = ("qwen2_5_vl",)
"""Vision models that are kept so (`benchmarks/vision/loading.py`)."""
ATTENTION_SCALES = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")


class ModelLoad:
    """Loads weights into a worker's part of vLLM's model."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        self.model: Any = model
        self.vllm_config, self.device = vllm_config, device
        self.plainly = loads_plainly(model, vllm_config, device)
        self.frozen: Collection[str] = ()
        self._held = set[str]()
        self._all_read = False
        self._copies, self._regions = RecordedCopies(model), RegionCopies(model)

    def regions(self, specs: Sequence[Spec], frozen: Collection[str]) -> Regions:
        if not self.plainly:
            return Regions(problem="vLLM rebuilds this model's layers from whole tensors")
        return self._regions.find(specs, lambda weights: self._load(iter(weights), frozen))

    def load_slices(self, staged: Sequence[tuple[Region, torch.Tensor]]) -> None:
        """Raises ValueError."""
        self._regions.load(staged)

    def load_staged(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load views of the staging copy. Raises ValueError if weights are missing."""
        self._load(weights, self.frozen, recorded=self.plainly)

    def forget_staged(self) -> None:
        self._copies.forget()
        self._regions.forget_staged()

    def load_folder(self, folder: Path) -> None:
        self._load(tensors_in(files_in(folder)), (), published=False)

    def load_trial(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._load(weights, (), published=False)

    def stream(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load buckets that later ones overwrite. Raises ChannelError for an end that another round can repair.

        Weights are cloned, because vLLM keeps them: its reload until a layer is complete, and the loaders of some
        models, such as GraniteMoE, until all have come.
        """
        copies = ((name, tensor.clone()) for name, tensor in weights)
        if self.plainly:
            self._load(copies, self.frozen)
            return
        try:
            self._load(copies, self.frozen)
        except ChannelError as error:
            raise RuntimeError(f"vLLM's layers are half rebuilt, so this server has to restart: {error}") from error

    @torch.no_grad()
    def _load(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        frozen: Collection[str],
        recorded: bool = False,
        published: bool = True,
    ) -> None:
        """`published`: the learner trains these weights, so each must be read. Files may have more than the model
        needs, such as a tower that is not served or layers for multi-token prediction."""
        model, model_config, parts = self.model, self.vllm_config.model_config, set[str]()
        with ExitStack() as stack:
            stack.enter_context(set_current_vllm_config(self.vllm_config))
            stack.enter_context(torch.device(self.device))
            stack.enter_context(packed_anew(model, self.device))
            if not self.plainly:
                name_loaders(model)
                initialize_layerwise_reload(model)
            expected = names(model)
            reading = stack.enter_context(ReadWeights()) if published and not self._all_read else None
            written = stack.enter_context(WrittenBytes(model.parameters())) if self.plainly and not recorded else None
            loaded, held = self._load_kinds(reading.watch(weights) if reading else weights, frozen, recorded)
            if written:
                parts = partly_written(model, written)
            if not self.plainly:
                parts = partly_loaded(model)
                finalize_layerwise_reload(model, model_config)  # type: ignore[no-untyped-call]
                repack_head(model)
        check_complete(expected - held, loaded, parts, model_config)
        if reading:
            check_read(reading.unread - set(frozen), type(model).__name__)
            self._all_read = True  # later policies bring the same weights

    def _load_kinds(
        self, weights: Iterator[tuple[str, torch.Tensor]], frozen: Collection[str], recorded: bool
    ) -> tuple[object, set[str]]:
        """Load frozen weights, if they come, and then the others. Raises ValueError if one layer has both kinds."""
        loaded, held = None, self._held if frozen else set[str]()
        for is_frozen, kind in groupby(weights, lambda weight: weight[0] in frozen):
            if is_frozen:
                held = self._held = self.model.load_weights(kind)
                if not isinstance(held, set):
                    name = type(self.model).__name__
                    raise ValueError(f"model.freeze: vLLM's {name} does not say which weights it loads; freeze nothing")
            elif recorded:
                loaded = self._copies.load(kind, held)
            else:
                loaded = self.model.load_weights(kind)
        layers = {name.rpartition(".")[0] for name in loaded} if isinstance(loaded, set) else set()
        if split := [name for name in held if name.rpartition(".")[0] in layers]:
            raise ValueError(
                f"{min(split)}: only a part of this layer of vLLM's is frozen; freeze all of it or nothing"
            )
        return loaded, held


def loads_plainly(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> bool:
    """Whether weights may be overwritten in place: only if vLLM keeps all as in the file (docs/design/engine.md). It
    takes a fifth of a reload's time."""
    model_config = vllm_config.model_config
    untried = model_config.is_multimodal_model and model_config.hf_config.model_type not in PLAIN_TOWERS
    if device.type != "cuda" or vllm_config.quant_config is not None or untried:
        return False
    modules = list(model.modules())
    plain = {*PLAIN_METHODS, METHOD} if loads_in_place(model, device) else {*PLAIN_METHODS}
    methods = {type(method).__name__ for m in modules if (method := getattr(m, "quant_method", None)) is not None}
    return methods <= plain and not any("MLA" in type(module).__name__ for module in modules)


def name_loaders(model: torch.nn.Module) -> None:
    """vLLM's reload reads the name of each loader; those of MiniMax-M2's norms are partials, without a name."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def repack_head(model: torch.nn.Module) -> None:
    """Pack a CPU's tied head anew: vLLM's reload leaves its copy of the embedding."""
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and type(layer).__name__ == "ParallelLMHead":
            layer.quant_method.process_weights_after_loading(layer)


def names(model: torch.nn.Module) -> set[str]:
    """Weights that a policy has to bring; FP8's attention scales stay at 1."""
    return {name for name, _ in model.named_parameters() if not name.endswith(ATTENTION_SCALES)}


def partly_loaded(model: torch.nn.Module) -> set[str]:
    kinds = LinearBase | RoutedExperts
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds))
    return {name for name, layer in layers if get_layerwise_info(layer).load_numel > 0}


def partly_written(model: torch.nn.Module, written: WrittenBytes) -> set[str]:
    """Linear layers and experts of which a load in place brought a part."""

    def lacks(layer: torch.nn.Module) -> bool:
        lacking = written.is_uneven if isinstance(layer, RoutedExperts) else written.is_part
        return any(map(lacking, layer.parameters(recurse=False)))

    kinds = LinearBase | RoutedExperts
    return {name for name, layer in model.named_modules() if isinstance(layer, kinds) and lacks(layer)}


def check_complete(expected: set[str], loaded: object, parts: set[str], model_config: Any) -> None:
    """Raise ValueError if weights are missing. Models that do not report their loads pass unless a layer is partly
    loaded."""
    missing = expected - set(map(parameter_name, loaded)) if isinstance(loaded, set) else set()
    configs = (model_config.hf_config, model_config.hf_text_config)  # vision-language models say it at the top only
    if any(getattr(config, "tie_word_embeddings", False) for config in configs):
        missing = {name for name in missing if not name.endswith("lm_head.weight")}
    missing |= parts
    if missing:
        raise ValueError(f"{len(missing)} weights of vLLM's model were not received, {min(missing)} among them")


def check_read(unread: set[str], model: str) -> None:
    """Raise ValueError if vLLM's model has no place for trained weights."""
    if unread:
        problem = f"vLLM's {model} has no place for {len(unread)} weights of the learner, such as {min(unread)}"
        raise ValueError(f"{problem}, and would compute other log-probabilities; take a model without them")


def files_in(folder: Path) -> list[Path]:
    """Raises FileNotFoundError if there are none, before anything is loaded."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no .safetensors file in it")
    return files


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
