"""Parts of a multimodal model that text does not pass: towers and projectors.

Where images are not trained, these parts are frozen, never computed, and sharded separately, so that no pass gathers
them. `exactness.py` tries whether text passes nothing else.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from configs.architecture import reads_images

TEXT_ALONE = "headrace_text_alone"
"""`model.text_alone` sets it in a config."""

AROUND_KEYS = (("vision_start_token_id", "vision_end_token_id"), ("boi_token_id", "eoi_token_id"))
"""Tokens around an image, of Qwen models and of MUTUAL ones."""


def sees(config: Any) -> bool:
    """Whether a model's images are trained."""
    return reads_images({"model_type": config.model_type}, getattr(config, TEXT_ALONE, False))


def nests_text(config: Any) -> bool:
    return config.get_text_config() is not config


def idle_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The largest modules with weights that text does not pass."""
    if not _has_idle(model):
        return []
    used = _used(model)

    def found(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            held = {id(parameter) for parameter in child.parameters()}
            if held and not held & used:
                yield child
            elif held - used:
                yield from found(child)

    return list(found(model))


def idle_names(model: PreTrainedModel) -> frozenset[str]:
    if not _has_idle(model):
        return frozenset()
    used, inside = _used(model), {id(module) for part in idle_modules(model) for module in part.modules()}
    owners = ((name, module) for name, module in model.named_modules() if id(module) in inside)
    buffers = {f"{name}.{key}" for name, module in owners for key, _ in module.named_buffers(recurse=False)}
    return frozenset(buffers | {name for name, parameter in model.named_parameters() if id(parameter) not in used})


def _has_idle(model: PreTrainedModel) -> bool:
    return nests_text(model.config) and not sees(model.config)


def _used(model: PreTrainedModel) -> set[int]:
    parts = model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
