"""Compares a policy's log-probabilities and gradients with those of transformers' eager model, which computes each
document alone.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from configs.certificate import Check, judged
from learner.certify.images import given_images, placed
from learner.certify.rows import Case
from learner.model.exactness import FOREIGN, alone, block_outputs, first_difference, named
from learner.model.policy import Policy

LIMIT = 1e-4
"""In nats; see `distance`."""
SERVER_LIMIT = 1e-3
"""vLLM's kernels compute in another order."""
GRADIENT_LIMIT = 1e-3
NEGLIGIBLE = 1e-3
"""Gradients below this share of the whole norm are compared with this share."""
Gradients = Mapping[str, Tensor]


def attempt(what: str, compared: Callable[[], Sequence[Check]]) -> list[Check]:
    """The checks, or a fault if the model cannot be computed."""
    try:
        return list(compared())
    except FOREIGN as error:
        return [Check(what=what, fault=f"it cannot be computed ({named(error)})")]


def compare(policy: Policy, reference: PreTrainedModel, case: Case) -> list[Check]:
    return attempt(case.what, lambda: [_logprobs(policy, reference, case), gradient(policy, reference, case)])


def _logprobs(policy: Policy, reference: PreTrainedModel, case: Case) -> Check:
    with torch.no_grad():
        with block_outputs(policy.model) as ours:
            got = policy(placed(policy, case.row), 1.0)[0][case.row.scored]
        policy.gathering.reshard()
        with block_outputs(reference) as theirs:
            wanted = expected(reference, case)
    where = _attention(policy) if case.shares else first_difference(policy.model, ours, theirs)
    return judged(case.what, distance(got, wanted), LIMIT, fault=where)


def gradient(policy: Policy, reference: PreTrainedModel, case: Case) -> Check:
    """Compare the gradients of a weighted sum of log-probabilities."""
    weights = coefficients(case)
    policy.zero_grad()
    (policy(placed(policy, case.row), 1.0)[0][case.row.scored] * weights).sum().backward()
    return judge_gradients(f"{case.what}, gradient", gradients_of(policy), gradients(reference, case), policy.model)


def gradients(reference: PreTrainedModel, case: Case) -> dict[str, Tensor]:
    """The reference's gradients of the same sum."""
    reference.zero_grad()
    (expected(reference, case) * coefficients(case)).sum().backward()
    return {name: x.grad for name, x in reference.named_parameters() if x.grad is not None}


def gradients_of(policy: Policy) -> dict[str, Tensor]:
    """The whole gradients. A collective."""
    found = ((name, x.grad) for name, x in policy.model.named_parameters() if x.grad is not None)
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found}


def judge_gradients(what: str, ours: Gradients, theirs: Gradients, model: nn.Module) -> Check:
    """A parameter that one side lacks has a zero gradient there."""
    whole = float(torch.stack([x.float().norm() for x in theirs.values()]).norm())
    worst, where = 0.0, ""
    for name in sorted({*ours, *theirs}):
        mine, own = ours.get(name), theirs.get(name)
        size = 0.0 if own is None else float(own.float().norm())
        zero = torch.zeros(())
        apart = float(((zero if mine is None else mine.float()) - (zero if own is None else own.float())).norm())
        share = apart / max(size, NEGLIGIBLE * whole)
        if not share <= worst:
            worst, where = share, name
    owner = where.rpartition(".")[0]
    kind = type(model.get_submodule(owner)).__name__ if where in ours else "learner"
    return judged(what, worst, GRADIENT_LIMIT, "of its norm", f"its {kind} ({where}) has another gradient")


def expected(reference: PreTrainedModel, case: Case) -> Tensor:
    """transformers' log-probabilities of a row's scored tokens: [scored]."""
    every = zip(case.texts, case.given, case.seen or [()] * len(case.texts), strict=True)
    return torch.cat([alone(reference, text, given_images(text, seen))[given - 1 :] for text, given, seen in every])


def coefficients(case: Case) -> Tensor:
    """Weights of log-probabilities: [scored]."""
    return torch.from_numpy(np.random.default_rng(9).standard_normal(len(case.row.scored)).astype(np.float32))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, above 1 nat as a share of theirs; NaN if one is not finite.

    Random weights give tens of nats, of which float32 has six digits.
    """
    theirs = theirs.detach()
    return float(((ours.detach() - theirs).abs() / theirs.abs().clamp(min=1.0)).max())


def _attention(policy: Policy) -> str:
    found = [type(module).__name__ for module in policy.model.modules() if "Attention" in type(module).__name__]
    return f"its {found[0] if found else 'attention'} gives answers to a shared prompt another output"
