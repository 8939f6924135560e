"""Loads an adapter into the one slot of vLLM's LoRA layers; the base comes from `model.path`.

`stream` runs in the staging's thread while the engine is paused, all else between two steps. A slot keeps its
addresses, so CUDA graphs stay valid. Tensors come with `lora_B` multiplied by alpha / rank.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from learner.weights.plan import LORA_A, LORA_B, Spec
from learner.weights.slices import Regions
from rollout.engine.door.vllm_worker import LoRAModel, PEFTHelper
from rollout.engine.lora.adapter_folder import NUMBER, WEIGHTS, AdapterFolder, is_adapter, same_model
from rollout.engine.model_load import tensors_in
from rollout.engine.recorded_copies import RecordedCopies


class AdapterLoad:
    """Takes the place of `ModelLoad`."""

    frozen: Collection[str] = ()

    def __init__(self, manager: Any, base: str, device: torch.device) -> None:
        self._slot, self._base = AdapterSlot(manager, device), base
        self._copies = RecordedCopies(self._slot, padded=True)

    def register(self) -> None:
        self._slot.register()

    def regions(self, specs: Sequence[Spec], frozen: Collection[str]) -> Regions:
        return Regions(problem="an adapter is loaded from whole tensors")

    def load_staged(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError if vLLM's model has other layers."""
        self._copies.load(weights)

    def forget_staged(self) -> None:
        self._copies.forget()

    def stream(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._slot.load_weights((name, tensor.clone()) for name, tensor in weights)

    def load_folder(self, folder: Path) -> None:
        """Load an adapter, or none for the base. Raises ValueError."""
        self._copies.forget()  # repeated copies would leave what a higher rank wrote
        if is_adapter(folder):
            scale = AdapterFolder.read(folder).scale
            tensors = tensors_in([folder / WEIGHTS])
            self._slot.place((name, value * (scale if name.endswith(LORA_B) else 1.0)) for name, value in tensors)
        elif same_model(str(folder), self._base):
            self._slot.clear()
        else:
            raise ValueError(f"{folder}: whole weights, and this engine serves adapters of {self._base}")


class AdapterSlot:
    """The slot as a model whose buffers are its parameters."""

    def __init__(self, manager: Any, device: torch.device) -> None:
        self._manager, self._inner, self._device = manager, manager._adapter_manager, device

    def register(self) -> None:
        """Take the slot for an empty adapter; `max_loras: 1` keeps it from others."""
        self._inner._registered_adapters[NUMBER] = LoRAModel(NUMBER, 1, {})
        self._inner.activate_adapter(NUMBER)

    def clear(self) -> None:
        for layer in self._inner.modules.values():
            layer.reset_lora(self._index)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, layer in self._inner.modules.items():
            for kind, buffers in ((LORA_A, layer.lora_a_stacked), (LORA_B, layer.lora_b_stacked)):
                yield from ((f"{name}{kind}.{index}", buffer) for index, buffer in enumerate(buffers))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError if a layer of `model.lora.targets` is missing."""
        self.place(weights, whole=True)

    def place(self, weights: Iterator[tuple[str, torch.Tensor]], whole: bool = False) -> None:
        """Zero the slot, then copy this worker's share. Raises ValueError if vLLM lacks a layer, or, with `whole`, the
        adapter a target."""
        tensors, lora_config = dict(weights), self._manager.lora_config
        rank = max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(LORA_A))
        # if alpha is the rank, vLLM does not multiply the staging copy in place
        settings = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": []})
        settings.validate_legal(lora_config)
        adapter = LoRAModel.from_lora_tensors(
            NUMBER,
            tensors,
            settings,
            device=str(self._device),
            dtype=lora_config.lora_dtype,
            model_vocab_size=self._manager.vocab_size,
            weights_mapper=self._renames(),
        )
        self._check(adapter, whole)
        self._inner._create_merged_loras_inplace(adapter)
        for name, layer in self._inner.modules.items():
            if weight := self._inner._get_lora_layer_weights(adapter, name):
                layer.set_lora(self._index, weight.lora_a, weight.lora_b)
            else:
                layer.reset_lora(self._index)

    @property
    def _index(self) -> int:
        return int(self._inner.lora_index_to_id.index(NUMBER))

    def _renames(self) -> Any:
        mapper = getattr(self._inner.model, "hf_to_vllm_mapper", None)
        if mapper is None:
            return None
        # vLLM 0.26 names it otherwise
        return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()

    def _check(self, adapter: LoRAModel, whole: bool) -> None:
        """vLLM ignores all other layers."""
        given, packed = set(adapter.loras), self._inner.packed_modules
        known = {part for name in self._inner.modules for part in packed.get(name, [name])}
        if strange := given - known:
            raise ValueError(
                f"{len(strange)} layers of the adapter are none that vLLM adapts, {min(strange)} among them; name in "
                "model.lora.targets only linear layers that its model has"
            )
        targets = set(self._manager.lora_config.target_modules)
        missing = {name for name in known - given if name.rpartition(".")[2] in targets} if whole else set()
        halves = {name for name, lora in adapter.loras.items() if lora.lora_a is None or lora.lora_b is None}
        if missing or halves:
            number, first = len(missing | halves), min(missing | halves)
            raise ValueError(f"the adapter lacks tensors of {number} layers of model.lora.targets, {first} among them")
