"""Signs of trouble in a version's metrics, with remedies."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

Rule = Callable[[float, float], bool]
"""(value, median of the history) -> whether to warn."""
COMPARED = 20
"""The median is over at most so many earlier values."""
LOOKED_BACK = 200
"""Versions that are searched for them: not every version has every metric."""
FRESH = "mismatch/k3_fresh"
"""k3 on tokens of age 0, if any were trained."""
BUCKETS = ("1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")
K3_BY_AGE = {FRESH: "0"} | {f"offpolicy/k3_age_{ages}": ages for ages in BUCKETS}
"""The youngest first."""
FEW_TOKENS = 0.01
"""A smaller share of the tokens shows chance."""
TAUGHT = "teacher/share"
"""A teacher teaches groups whose rewards are equal too."""
BY_REWARD_ALONE = ("groups/solved_all", "groups/solved_none")


def alerts(metrics: Mapping[str, float], history: Sequence[Mapping[str, float]], least: int = 5) -> list[str]:
    """Return a line with a remedy for each sign of trouble.

    Rules relative to `history` need `least` versions with the metric.
    """
    lines = []
    k3 = youngest_k3(metrics)
    for key, relative, rule, remedy in ALERTS:
        past = [record[key] for record in history[-LOOKED_BACK:] if key in record][-COMPARED:]
        if key not in metrics or (relative and len(past) < least) or (key in K3_BY_AGE and key != k3):
            continue
        if key in BY_REWARD_ALONE and metrics.get(TAUGHT):
            continue
        usual = median(past) if past else 0.0
        if rule(metrics[key], usual):
            against = f", {usual:.3g} in the median of {len(past)} versions" if relative else ""
            lines.append(f"{key} is {metrics[key]:.3g}{against}: {remedy}")
    return lines


def youngest_k3(metrics: Mapping[str, float]) -> str | None:
    """The k3 of the youngest trained tokens that are FEW_TOKENS or more."""
    found = (key for key, age in K3_BY_AGE.items() if metrics.get(f"age/share_{age}", 1.0) >= FEW_TOKENS)
    return next((key for key in found if key in metrics), None)


ALERTS: tuple[tuple[str, bool, Rule, str], ...] = (
    (FRESH, True, lambda now, usual: now > 2 * usual and now > 1e-5,
     "servers and learner drift apart on fresh tokens; check with weights.probe_every 1, lower learner.lr"),
    # k3 grows with the square of the age: it is 4 times the median if all tokens are of a bucket's older ages
    *((f"offpolicy/k3_age_{ages}", True, lambda now, usual: now > 5 * usual and now > 1e-3,
       "servers and learner drift apart on the youngest tokens of this batch; check with weights.probe_every 1, lower "
       "learner.lr or batch.max_staleness") for ages in BUCKETS),
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
    ("critic/explained_variance", False, lambda now, usual: now < -0.5,
     "the critic's values mislead the policy; lower algorithm.critic.learning_rate or set its warmup_versions"),
    ("groups/solved_all", False, lambda now, usual: now > 0.8,
     "most problems teach nothing; take harder ones, or set batch.skip_zero_variance"),
    ("groups/solved_none", False, lambda now, usual: now > 0.8,
     "most problems teach nothing; take easier ones, or raise batch.samples"),
)  # fmt: skip
"""Metric, whether the rule is relative to its history, rule, remedy."""
