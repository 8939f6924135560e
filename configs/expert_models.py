"""Mixtures of experts into which servers load policies: which were compared with transformers, and on which device.

Pure data. Two refusals read it: of a model's config.json, before anything starts (`configs/checks.py`), and of vLLM's
class, when a server starts (`rollout/engine/experts/expert_kernels.py`). A mixture in no table is tried when its server
starts (`rollout/engine/experts/reload_trial.py`).
"""

from typing import NamedTuple

CPU, GPU = "cpu", "cuda"


class ExpertModel(NamedTuple):
    """A type: its name in config.json (of the text model) and vLLM's class."""

    kind: str
    architecture: str
    devices: tuple[str, ...]
    """Where reloads were compared by tests."""
    split: bool = False
    """Compared with tensor parallelism 2 too, on a CPU."""
    in_place: bool = False
    """Loads in place were compared on a GPU, with Triton's kernel."""


PROVEN = (
    ExpertModel("qwen3_moe", "Qwen3MoeForCausalLM", (CPU, GPU), split=True, in_place=True),
    ExpertModel("qwen2_moe", "Qwen2MoeForCausalLM", (CPU, GPU), in_place=True),
    ExpertModel("qwen3_next", "Qwen3NextForCausalLM", (CPU, GPU), in_place=True),
    ExpertModel("qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration", (CPU, GPU)),
    ExpertModel("glm4_moe", "Glm4MoeForCausalLM", (CPU, GPU), in_place=True),
    ExpertModel("mixtral", "MixtralForCausalLM", (CPU, GPU), in_place=True),
    ExpertModel("olmoe", "OlmoeForCausalLM", (CPU, GPU), in_place=True),
    ExpertModel("granitemoe", "GraniteMoeForCausalLM", (GPU,), in_place=True),
    ExpertModel("gpt_oss", "GptOssForCausalLM", (GPU,), in_place=True),
    ExpertModel("deepseek_v2", "DeepseekV2ForCausalLM", (GPU,)),
    ExpertModel("deepseek_v3", "DeepseekV3ForCausalLM", (GPU,)),
    ExpertModel("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", (GPU,), in_place=True),
)
KEPT_WHOLE = ("granitemoe", "granitemoeshared")
"""Types whose loader in vLLM 0.26 keeps all weights until the last has come. It gets clones of what buckets hold."""
REPLAYED = ("qwen3_moe",)
"""Types whose routes the learner replays."""
OTHER_MIXTURE = "use another device, or a model that docs/experts.md lists"
KEEPS_EXPERTS = "keeps the experts of an earlier policy"
LATENT = "computes latent attention otherwise than the learner"
NO_ROUTER_BIAS = "cannot compute a router with a bias of its scores and no groups"
KEEPS_ROUTER_BIAS = "cannot load the bias of a router's scores again"


class FailingModel(NamedTuple):
    """A type that failed the comparison on `device`: vLLM there does what `fault` says."""

    kind: str
    architecture: str
    device: str
    fault: str


FAILING = (
    FailingModel("gpt_oss", "GptOssForCausalLM", CPU, KEEPS_EXPERTS),
    FailingModel("deepseek_v2", "DeepseekV2ForCausalLM", CPU, LATENT),
    FailingModel("deepseek_v3", "DeepseekV3ForCausalLM", CPU, LATENT),
    FailingModel("minimax_m2", "MiniMaxM2ForCausalLM", CPU, NO_ROUTER_BIAS),
    FailingModel("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", CPU, NO_ROUTER_BIAS),
    FailingModel("laguna", "LagunaForCausalLM", CPU, NO_ROUTER_BIAS),
    FailingModel("afmoe", "AfmoeForCausalLM", CPU, KEEPS_ROUTER_BIAS),
)


def is_expert_layer(name: str, kind: str) -> bool:
    """Whether a module, called `name` by its parent and of the class `kind`, has experts. A dense model of a family of
    mixtures has classes whose names only begin so, such as Qwen3MoeMLP."""
    return name.endswith(("experts", "moe")) or kind.endswith(("Experts", "MoE", "MoEBlock", "MoeBlock"))


def proven(device: str, parallel: int = 1) -> list[ExpertModel]:
    """Types compared on `device`, with `parallel` workers of a server. Several were compared on a CPU alone, by vLLM's
    reload: what loads in place on a GPU has not been."""
    together = [model for model in PROVEN if device in model.devices]
    return [model for model in together if parallel == 1 or (model.split and (device == CPU or not model.in_place))]


def is_loaded_in_place(kind: str | None) -> bool:
    """Whether vLLM loads the type in place with Triton's kernel."""
    return any(model.in_place and model.kind == kind for model in PROVEN)


def failing(device: str) -> list[FailingModel]:
    return [model for model in FAILING if model.device == device]


def is_proven(kind: str | None, device: str, parallel: int) -> bool:
    """Whether the type was compared on `device`; for `auto`, on each."""
    devices = (CPU, GPU) if device not in (CPU, GPU) else (device,)
    return all(kind in {model.kind for model in proven(each, parallel)} for each in devices)


def described() -> str:
    """The sentence of docs/experts.md."""
    both = [model.kind for model in PROVEN if set(model.devices) == {CPU, GPU}]
    words = [f"{', '.join(f'`{kind}`' for kind in both)} on CPUs and GPUs"]
    for device, place in ((GPU, "on GPUs"), (CPU, "on CPUs")):
        alone = [model.kind for model in PROVEN if model.devices == (device,)]
        if alone:
            words.append(f"{', '.join(f'`{kind}`' for kind in alone)} {place} alone")
    return "; ".join(words)
