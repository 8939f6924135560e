"""Makes layers of vLLM compute what transformers does. Each vLLM worker imports this module before it builds its model.

vLLM keeps the two numbers of Apertus's activation in bfloat16, also in a model of float32.
"""

from functools import wraps
from typing import Any

import torch

from rollout.engine.door.vllm_worker import XIELU


class ExactLayers:
    """vLLM mixes this into the workers of teacher and reward servers, and so imports the module."""


def follow_model_dtype() -> None:
    """Give Apertus's activation the type of the model's weights."""
    initialise = XIELU.__init__

    @wraps(initialise)
    def of_models_dtype(layer: XIELU, *args: Any, **given: Any) -> None:
        initialise(layer, *args, **{"dtype": torch.get_default_dtype(), **given})

    XIELU.__init__ = of_models_dtype  # type: ignore[method-assign, assignment]


follow_model_dtype()
