"""What `learner.matmul: fp8` must satisfy by the run file and config.json, and what it costs.
`actors/doctor/fp8_gpus.py` asks the driver, `learner/model/float8.py` asks torch and the built model."""

from collections.abc import Iterator

from configs.critic import keeps_critic
from configs.model_facts import facts_of
from configs.schema import Config

KEY = "learner.matmul: fp8"
LEAST = (8, 9)
"""Compute capability: Ada, Hopper and later."""
REMEDY = "set learner.matmul: bfloat16"


def contradictions(config: Config) -> Iterator[str]:
    if config.learner.matmul != "fp8":
        return
    learner, model, facts = config.learner, config.model, facts_of(config.model)
    if learner.device == "cpu":
        yield f"{KEY} needs a GPU, but learner.device is cpu; {REMEDY}"
    if model.dtype != "bfloat16":
        yield f"{KEY} casts bfloat16, but model.dtype is {model.dtype}; set model.dtype: bfloat16, or {REMEDY}"
    if learner.compile is False:
        yield f"{KEY} casts in compiled code, but learner.compile is false; set learner.compile: auto, or {REMEDY}"
    if learner.cpu_offload is True:
        yield f"{KEY} is compiled, which is not tested with learner.cpu_offload: true; set that to false, or {REMEDY}"
    elif learner.cpu_offload:
        yield f"{KEY} is not tested with learner.cpu_offload: {learner.cpu_offload}; set that to false, or {REMEDY}"
    if model.lora:
        yield f"{KEY} is not tested with model.lora; set model.lora: null, or {REMEDY}"
    if keeps_critic(config):
        yield f"{KEY} is not tested with a critic (algorithm.advantage: gae); set another advantage, or {REMEDY}"
    if facts.experts:
        yield f"{KEY} has no products of experts, and {model.path} has {facts.experts} a layer; {REMEDY}"
    if facts.tower:
        yield f"{KEY} is not tested with images, which {model.path} reads; {REMEDY}"
    if facts.delta_rule:
        yield f"{KEY} is not tested with layers that keep a state, as {model.path} has; {REMEDY}"


def lines(config: Config) -> Iterator[str]:
    if config.learner.matmul == "fp8":
        stays = "head, embeddings, norms, attention, and layers with a size that 16 does not divide"
        yield f"matmul: the blocks' linear layers multiply in FP8, forward and both gradients; in bfloat16 stay {stays}"
        yield f"matmul: its price is rounding: {PRICE}"


PRICE = "each product is off by 4 %, and gradients ten times as far as in bfloat16; 1.2 times the tokens/s at 7B"


def too_old(where: str, capability: tuple[int, int] | None) -> str | None:
    """`capability`: None for a CPU."""
    if capability is not None and capability >= LEAST:
        return None
    has = "" if capability is None else f" has {capability[0]}.{capability[1]}"
    return f"{KEY} needs a GPU with compute capability {LEAST[0]}.{LEAST[1]} or later, and {where}{has}; {REMEDY}"
