"""Tiny random mixtures of experts of each family: what a server is given of them, and what it is compared with.

family = FAMILIES["glm4_moe"]
model = family.model(seed=1)              # transformers' model, in float32; its weights are numbers of bfloat16
policy = FamilyPolicy(model, torch.bfloat16, device)     # publishes as the learner does, and `save` writes a folder
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedModel

from benchmarks.models.families import DEFAULTS
from learner.model.file_form import FileForm
from learner.model.loading import auto_class, persistent_buffers
from learner.model.shrink import UNMOVED, small
from learner.weights.plan import Spec
from tests.harness.published import scores

GAIN, MOVED = 1.5, 0.2
"""The scale of random matrices, and that of the noise that is added to vectors."""
EAGER: dict[str, Any] = {"enforce_eager": True}
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Family:
    """A `model_type`, and what differs from its default config. `engine`: further arguments of vLLM. `idle`: the
    beginning of the names of weights that no text passes."""

    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=lambda: EAGER)
    idle: str = ""

    @property
    def text_kind(self) -> str:
        """The type of the text model, by which run files are judged."""
        return f"{self.kind}_text" if self.idle else self.kind

    def model(self, seed: int) -> PreTrainedModel:
        """Return a model whose every weight is drawn by `seed`."""
        config = small(AutoConfig.for_model(self.kind, **DEFAULTS.get(self.kind, {}) | dict(self.changes)))
        config.get_text_config().bos_token_id = config.get_text_config().eos_token_id = None
        torch.manual_seed(seed)
        made = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        draw(made, seed)
        return made


DELTA_RULE: dict[str, Any] = {**EAGER, "gdn_prefill_backend": "triton"}
DENSE_FIRST = {"first_k_dense_replace": 1}
DEEPSEEK_V3 = {**DENSE_FIRST, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""As in the published config.json: vLLM reads keys that transformers does not write by itself."""
MINIMAX = {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
AFMOE = {"n_group": 1, "topk_group": 1, "score_func": "sigmoid", "route_norm": True}
GRAPHS: dict[str, Any] = {"max_cudagraph_capture_size": 16}
FAMILIES: dict[str, Family] = {
    "glm4_moe": Family("glm4_moe"),
    "mixtral": Family("mixtral"),
    "olmoe": Family("olmoe"),
    "qwen2_moe": Family("qwen2_moe"),
    "qwen3_moe": Family("qwen3_moe", {"norm_topk_prob": True}),
    "gpt_oss": Family("gpt_oss"),
    "deepseek_v2": Family("deepseek_v2", DENSE_FIRST),
    "deepseek_v3": Family("deepseek_v3", DEEPSEEK_V3),
    "qwen3_next": Family("qwen3_next", engine=DELTA_RULE),
    "qwen3_5_moe": Family("qwen3_5_moe", engine=DELTA_RULE, idle="model.visual."),
    "ernie4_5_moe": Family("ernie4_5_moe"),
    "afmoe": Family("afmoe", AFMOE),
    "laguna": Family("laguna"),
    "minimax_m2": Family("minimax_m2", MINIMAX),
    "granitemoe": Family("granitemoe"),
    "gpt_oss, graphs": Family("gpt_oss", engine=GRAPHS),
    "glm4_moe, graphs": Family("glm4_moe", engine=GRAPHS),
    "deepseek_v3, graphs": Family("deepseek_v3", DEEPSEEK_V3, GRAPHS),
}
"""By name; with `graphs`, a GPU runs CUDA graphs and compiled blocks."""


@torch.no_grad()
def draw(model: PreTrainedModel, seed: int) -> None:
    """Draw all weights and persistent buffers, as numbers of bfloat16."""
    source = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=source)
        if parameter.dim() > 1 and "bias" not in name:
            parameter.copy_(noise * GAIN / parameter.shape[-1] ** 0.5)
        elif name.rpartition(".")[2] not in UNMOVED:
            parameter.add_(MOVED * noise)
        else:
            parameter.add_(MOVED / 4 * noise)
        parameter.copy_(parameter.bfloat16())
    for _, buffer in persistent_buffers(model):
        if buffer.is_floating_point():
            buffer.copy_((buffer + MOVED * torch.randn(buffer.shape, generator=source)).bfloat16())


class FamilyPolicy:
    """A model as the learner publishes it: the tensors of its files, under their names."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.model, self._dtype, self._device, self._form = model, dtype, device, FileForm(model)

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(self._device, self._dtype)
        for name, buffer in persistent_buffers(self.model):
            yield name, buffer.to(self._device)

    def full_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._held():
            yield from (each for each in self._form.tensors(name, tensor) if each[0] not in without)

    def specs(self) -> list[Spec]:
        return [Spec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.full_weights()]

    def logprobs_of(self, tokens: list[int]) -> list[float]:
        return scores(self.model, tokens)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu().contiguous() for name, tensor in self.full_weights()}

    def save(self, folder: Path) -> None:
        """Write config and weights, from which vLLM starts."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.model.config
        config.architectures, config.dtype = [type(self.model).__name__], self._dtype
        config.save_pretrained(folder)
        save(self.tensors(), folder)


def save(tensors: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """Write one file of weights into `folder`, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def kind_of(name: str) -> str:
    """`model.layers.0.mlp.experts.3.up_proj.weight` -> `model.layers.#.mlp.experts.#.up_proj.weight`"""
    return NUMBER.sub("#", name)
