"""What a model's head computes besides the product with the output embedding: a bias, a scale and a softcap.

    logits = cap * tanh(scale * (hidden @ weight.T + bias) / cap)

`Epilogue.of` reads scale and softcap from the config, where each family has its own key. Whether that is all is tried:
`exactness.py` compares the log-probabilities with those of the model's own forward pass, and refuses the model by name
otherwise. `head.py` applies it to each chunk of logits. Pure; used by `policy.py` and `exactness.py`.
"""

from typing import Any, NamedTuple

from configs.architecture import PROVEN

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
"""Keys of a factor of the logits: Cohere's and Falcon-H1's."""
DIVISORS = ("logits_scaling",)
"""Keys of a divisor of the logits: Granite's and MiniCPM3's."""
MULTIPLYING = ("hyperclovax",)
"""Types of models that multiply by the keys in DIVISORS."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Keys of a bound of the logits: Gemma's and RecurrentGemma's."""


class Epilogue(NamedTuple):
    """Example: `Epilogue(scale=0.25)` for Cohere, `Epilogue(softcap=30.0)` for Gemma 2."""

    scale: float = 1.0
    """The factor of the logits, before the softcap."""
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "Epilogue":
        """The epilogue that the config of a model in transformers asks for."""
        text, scale = config.get_text_config(), 1.0
        if config.model_type in PROVEN:  # they ignore such keys
            return cls()
        for keys, sign in ((MULTIPLIERS, 1), (DIVISORS, 1 if text.model_type in MULTIPLYING else -1)):
            for key in keys:
                if isinstance(value := getattr(text, key, None), int | float) and value:
                    scale *= float(value) ** sign
        caps = [cap for key in SOFTCAPS if (cap := getattr(text, key, None))]
        return cls(scale, float(caps[0]) if caps else None)
