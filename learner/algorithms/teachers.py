"""On-policy distillation: what a teacher adds to each token's advantage, and its metrics (docs/teachers.md).

A gains weight (log q - log mu), with teacher q and behaviour policy mu. The mean of log mu - log q over sampled tokens
is an unbiased estimate of the reverse KL of mu to q (arXiv:2306.13649; Thinking Machines, On-Policy Distillation,
2025).
"""

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

SHARE, KL = "teacher/share", "teacher/reverse_kl"
"""Share of sampled tokens with a teacher; their reverse KL in nats."""
DIVERGENCE, DIVERGENCE_SUM, DIVERGENCE_TOKENS = "teacher/divergence", "teacher_divergence", "teacher_divergence_tokens"
"""With `teacher.top_k`: mean divergence in nats; its sum, and the tokens that are trained by it."""


def with_teacher(advantages: Tensor, teacher: Tensor, behaviour: Tensor, weights: Tensor) -> Tensor:
    """A + weight (log q - log mu): [tokens] float. Weights are 0 without a teacher."""
    return advantages + weights * (teacher - behaviour)


def kl_sums(kl: Mapping[str, tuple[float, int]], names: Iterable[str]) -> dict[str, float]:
    """Sums over a rank's samples, with the same keys on all ranks.

    `kl`: by teacher the sum of log mu - log q, and its tokens.
    """
    sums = dict[str, float]()
    for name in names:
        sums[_key(name, "kl")], sums[_key(name, "tokens")] = kl.get(name, (0.0, 0))
    return sums


def kl_metrics(sums: Mapping[str, float], names: Collection[str], sampled: float) -> dict[str, float]:
    if not names:
        return {}
    tokens = {name: sums[_key(name, "tokens")] for name in names}
    kl = {name: sums[_key(name, "kl")] for name in names}
    metrics = {SHARE: sum(tokens.values()) / max(sampled, 1.0)}
    if total := sum(tokens.values()):
        metrics[KL] = sum(kl.values()) / total
    if trained := sums.get(DIVERGENCE_TOKENS):
        metrics[DIVERGENCE] = sums[DIVERGENCE_SUM] / trained
    named = {name: number for name, number in tokens.items() if number and len(names) > 1}
    return metrics | {f"teacher/{name or 'other'}/reverse_kl": kl[name] / number for name, number in named.items()}


def _key(name: str, what: str) -> str:
    return f"teacher_{what}/{name}"
