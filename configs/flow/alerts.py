"""Signs of trouble in a version's metrics, with remedies. Pure.

Used by the learner, whose log warns, and by the page and the screen of a run (`actors/watch/advice.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

Rule = Callable[[float, float], bool]
"""(value, median of the history) -> whether to warn."""
TAUGHT = "teacher/share"
"""The metric of a run with a teacher, which teaches groups whose rewards are equal too."""
BY_REWARD_ALONE = ("groups/solved_all", "groups/solved_none")
"""Metrics that are no sign of trouble where a teacher teaches."""


def alerts(metrics: Mapping[str, float], history: Sequence[Mapping[str, float]], least: int = 5) -> list[str]:
    """One line, with a remedy, for each sign of trouble in training.

    `history`: metrics of earlier versions, of which the last 20 count; rules relative to them need at least `least`.
    """
    lines = []
    for key, relative, rule, remedy in ALERTS:
        past = [record[key] for record in history[-20:] if key in record]
        if key not in metrics or (relative and len(past) < least):
            continue
        if key in BY_REWARD_ALONE and metrics.get(TAUGHT):
            continue
        usual = median(past) if past else 0.0
        if rule(metrics[key], usual):
            against = f", {usual:.3g} in the median of {len(past)} versions" if relative else ""
            lines.append(f"{key} is {metrics[key]:.3g}{against}: {remedy}")
    return lines


ALERTS: tuple[tuple[str, bool, Rule, str], ...] = (
    ("mismatch/k3_fresh", True, lambda now, usual: now > 2 * usual and now > 1e-5,
     "servers and learner drift apart on fresh tokens; check with weights.probe_every 1, lower learner.lr"),
    ("offpolicy/k3", False, lambda now, usual: now > 0.05,
     "the data are far off-policy; lower batch.max_staleness or learner.lr, or take algorithm.loss m2po"),
    ("ess/sequence", True, lambda now, usual: now < usual / 2,
     "few samples dominate the batch; lower learner.lr or batch.max_staleness, raise batch.groups"),
    ("ess/token", False, lambda now, usual: now < 0.5,
     "few tokens dominate the batch; lower batch.max_staleness or learner.lr"),
    ("limit/masked_positive", False, lambda now, usual: now > 0.03,
     "positive tokens are masked; lower batch.max_staleness or learner.lr, or widen the bound of the loss"),
    ("limit/masked_negative", False, lambda now, usual: now > 0.03,
     "negative tokens are masked; lower batch.max_staleness or learner.lr, or widen the bound of the loss"),
    ("limit/capped_positive", False, lambda now, usual: now > 0.03,
     "importance weights are capped; lower batch.max_staleness or learner.lr, or raise algorithm.is_cap"),
    ("length/truncated", False, lambda now, usual: now > 0.1,
     "answers are truncated; raise sampling.max_tokens, or set algorithm.overlong to soft or mask"),
    ("buffer/failed_share", False, lambda now, usual: now > 0.05,
     "attempts fail, whose groups are made again or dropped; `python -m actors status` names the reasons"),
    ("problems/left_out_share", False, lambda now, usual: now > 0.05,
     "rows failed all their attempts and are left out; `python -m buffer problems RUN --state left_out` says why"),
    ("buffer/quarantined", True, lambda now, usual: now > usual,
     "groups cannot be trained and went into quarantine; `python -m buffer quarantine RUN` says why"),
    ("entropy/mean", True, lambda now, usual: now < 0.3 * usual,
     "the policy stops exploring; set algorithm.entropy_bonus, raise sampling.temperature or the loss's upper bound"),
    ("gradient/skipped", False, lambda now, usual: now > 0,
     "the gradient was not finite and the step changed nothing, see the log; lower learner.lr, bound the reward"),
    ("gradient/zero", False, lambda now, usual: now > 0,
     "the batch had no effect, see the log; take other problems, raise batch.samples, look at the reward"),
    ("gradient/norm", True, lambda now, usual: now > 10 * usual,
     "the gradient is unusually large; look at the batch's samples, lower learner.max_grad_norm"),
    ("groups/solved_all", False, lambda now, usual: now > 0.8,
     "most problems teach nothing; take harder ones, or set batch.skip_zero_variance"),
    ("groups/solved_none", False, lambda now, usual: now > 0.8,
     "most problems teach nothing; take easier ones, or raise batch.samples"),
)  # fmt: skip
"""Metric, whether the rule is relative to its history, rule, remedy. Sources of the thresholds: docs/algorithms.md."""
