"""What a model's head computes after the product with the output embedding.

    logits = cap * tanh(scale * (hidden @ weight.T + bias) / cap)

`exactness.py` tries whether that is all.
"""

from typing import Any, NamedTuple

from configs.architecture import PROVEN

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
"""Factors of Cohere and Falcon-H1."""
DIVISORS = ("logits_scaling",)
"""Divisors of Granite and MiniCPM3."""
MULTIPLYING = ("hyperclovax",)
"""Models that multiply by DIVISORS."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Bounds of logits in Gemma and RecurrentGemma."""


class Epilogue(NamedTuple):
    """Example: `Epilogue(scale=0.25)` for Cohere, `Epilogue(softcap=30.0)` for Gemma 2."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "Epilogue":
        text, scale = config.get_text_config(), 1.0
        if config.model_type in PROVEN:  # they ignore such keys
            return cls()
        for keys, sign in ((MULTIPLIERS, 1), (DIVISORS, 1 if text.model_type in MULTIPLYING else -1)):
            for key in keys:
                if isinstance(value := getattr(text, key, None), int | float) and value:
                    scale *= float(value) ** sign
        caps = [cap for key in SOFTCAPS if (cap := getattr(text, key, None))]
        return cls(scale, float(caps[0]) if caps else None)
