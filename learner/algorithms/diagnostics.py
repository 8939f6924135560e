"""Sums that show how far data and policy are apart, and their metrics.

Sums are [] float64 and add over microbatches and ranks; keys in `_max` combine by maximum. Keys never depend on the
data.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from learner.algorithms.inputs import LossInputs

AGES = (0, 1, 2, 4, 8, 16, 32, 64)
BUCKETS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")
UNDONE = "undone"
"""The bucket of tokens whose policy a rewind undid."""
SIGNS = ("positive", "negative")
BY_SAMPLE = ("sample_log_ratio", "sample_tokens")
MAX_LOG_WEIGHT = 350.0
"""The square of its exp stays within float64."""


def mismatch_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Divergence of learner and behaviour policy, by age; sums of importance weights.

    x = log pi - log mu; k1 = -x, k3 = e^x - 1 - x (Schulman's estimators of KL(mu | pi)), m2 = x^2 (M2PO).
    """
    log_ratio = inputs.log_ratio.detach().double()
    sampled = inputs.sampled.double()
    weight = log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp() * sampled
    k3 = torch.expm1(log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)) - log_ratio
    table = torch.stack([sampled, -log_ratio, k3, log_ratio**2], dim=1) * sampled[:, None]
    sums = dict(zip(("tokens", "all/k1", "all/k3", "all/m2"), table.sum(0).unbind(), strict=True))
    sums |= {"weight": weight.sum(), "weight_squared": (weight**2).sum(), "ratio_max": _largest(weight)}
    totals = inputs.per_sequence(log_ratio), inputs.lengths()
    if inputs.scattered:
        sums |= {name: total[: inputs.num_sequences] for name, total in zip(BY_SAMPLE, totals, strict=True)}
    else:
        sums |= _sequence_sums(*totals)
    if inputs.entropy is not None:
        sums["entropy"] = inputs.entropy.detach().double().sum()
    if inputs.reference is not None:
        x = (inputs.policy_logprobs.detach() - inputs.reference).double()
        sums["reference/k3"] = (torch.expm1((-x).clamp(max=MAX_LOG_WEIGHT)) + x).sum()
    return sums | (_age_sums(inputs, table) if inputs.versions is not None else {})


def _sequence_sums(log_ratio: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """From sums of log-ratios and numbers of sampled tokens: [samples] each."""
    present = lengths > 0
    weight = torch.where(present, log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp(), 0)
    return {
        "sequences": present.double().sum(),
        "sequence_weight": weight.sum(),
        "sequence_weight_squared": (weight**2).sum(),
    }


def _age_sums(inputs: LossInputs, table: Tensor) -> dict[str, Tensor]:
    assert inputs.versions is not None
    first, last = inputs.undone
    undone = (inputs.versions > inputs.version) | ((inputs.versions > first) & (inputs.versions <= last))
    age = torch.where(inputs.sampled & ~undone, inputs.version - inputs.versions, 0)
    bucket = torch.stack([age >= low for low in AGES[1:]]).sum(0)  # copying AGES to the GPU would block
    bucket = torch.where(undone, len(AGES), bucket)
    rows = table.new_zeros(len(AGES) + 1, table.shape[1]).index_add(0, bucket, table)
    sums = {"token_age": age.double().sum(), "token_age_max": _largest(age.double())}
    sums["tokens_with_age"] = table[:, 0].sum() - rows[-1, 0]
    for name, row in zip((*BUCKETS, UNDONE), rows.unbind(), strict=True):
        sums |= dict(zip((f"age/{name}/{what}" for what in ("tokens", "k1", "k3", "m2")), row.unbind(), strict=True))
    return sums


def limit_sums(inputs: LossInputs, masked: Tensor, capped: Tensor) -> dict[str, Tensor]:
    """Masked and capped tokens by sign of the advantage."""
    sums: dict[str, Tensor] = {}
    for name, side in zip(SIGNS, (inputs.advantages > 0, inputs.advantages < 0), strict=True):
        side = side & inputs.sampled
        sums[f"{name}/masked"] = (side & masked).double().sum()
        sums[f"{name}/capped"] = (side & capped).double().sum()
    return sums


def per_sample_sums(numbers: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    columns = {name: torch.tensor(of, dtype=torch.float64) for name, of in numbers.items()}
    sums = {name: column.sum() for name, column in columns.items()}
    sums |= {f"{name}_max": _largest(column) for name, column in columns.items()}
    return sums | {"samples": torch.ones_like(next(iter(columns.values()))).sum()}


def sample_metrics(rewards: Tensor, groups: Tensor, lengths: Tensor, truncated: Tensor) -> dict[str, float]:
    """Metrics of the whole batch from [samples] each. A sample with reward 1 solves its group."""
    solved = [rewards[groups == group] >= 1 for group in groups.unique()]
    rewards, lengths = rewards.double(), lengths.double()
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(correction=0),
        "length/mean": lengths.mean(),
        "length/max": lengths.max(),
        "length/truncated": truncated.double().mean(),
        "groups/solved_all": torch.stack([group.all() for group in solved]).double().mean(),
        "groups/solved_none": torch.stack([~group.any() for group in solved]).double().mean(),
    }
    return {name: float(value) for name, value in metrics.items()}


def _largest(values: Tensor) -> Tensor:
    return torch.cat([values.new_zeros(1), values]).max()


def is_max(key: str) -> bool:
    return key.endswith("_max")


def combine(microbatches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Combine the sums of microbatches."""
    columns = {key: torch.stack([sums[key] for sums in microbatches]) for key in microbatches[0]}
    totals = {key: column.amax(0) if is_max(key) else column.sum(0) for key, column in columns.items()}
    of_samples = [totals.pop(name) for name in BY_SAMPLE if name in totals]
    return totals | (_sequence_sums(*of_samples) if of_samples else {})


def summary(sums: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Metrics of a version from sums of its whole batch."""
    get = {key: float(value) for key, value in sums.items()}
    metrics = {key: value for key, value in get.items() if key.startswith("loss/")}
    for name, (over, under) in MEANS.items():
        if over in get and get.get(under, 0) > 0:
            metrics[name] = get[over] / get[under]
    metrics |= {name: get[key] for name, key in MAXIMA.items() if key in get}
    for what, prefix, count in (("token", "", "tokens"), ("sequence", "sequence_", "sequences")):
        squares = get.get(f"{prefix}weight_squared", 0) * get.get(count, 0)
        if squares > 0:
            metrics[f"ess/{what}"] = get[f"{prefix}weight"] ** 2 / squares
    return metrics


MEANS: dict[str, tuple[str, str]] = {
    "offpolicy/k1": ("all/k1", "tokens"),
    "offpolicy/k3": ("all/k3", "tokens"),
    "offpolicy/m2": ("all/m2", "tokens"),
    "mismatch/k1_fresh": ("age/0/k1", "age/0/tokens"),
    "mismatch/k3_fresh": ("age/0/k3", "age/0/tokens"),
    "mismatch/m2_fresh": ("age/0/m2", "age/0/tokens"),
    **{f"offpolicy/{m}_age_{b}": (f"age/{b}/{m}", f"age/{b}/tokens") for b in BUCKETS[1:] for m in ("k1", "k3", "m2")},
    **{f"age/share_{b}": (f"age/{b}/tokens", "tokens") for b in (*BUCKETS, UNDONE)},
    "age/token_mean": ("token_age", "tokens_with_age"),
    "ratio/mean": ("weight", "tokens"),
    **{f"limit/{what}_{sign}": (f"{sign}/{what}", "tokens") for what in ("masked", "capped") for sign in SIGNS},
    "entropy/mean": ("entropy", "tokens"),
    "reference/k3": ("reference/k3", "tokens"),
    "age/versions_per_sample": ("versions", "samples"),
    "turns/mean": ("turns", "samples"),
    "segments/mean": ("segments", "samples"),
}
"""Metric: sum, and count that divides it."""

MAXIMA = {
    "ratio/max": "ratio_max",
    "age/token_max": "token_age_max",
    "age/versions_per_sample_max": "versions_max",
    "turns/max": "turns_max",
    "segments/max": "segments_max",
}
