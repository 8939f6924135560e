"""A weight that a loader of vLLM skips is named: its model would be served without it."""

import pytest
import torch

from rollout.engine.model_load import check_read
from rollout.engine.read_weights import ReadWeights

NAMES = ("q.weight", "q.bias", "o.weight", "o.bias")


def load(weights, skipped=(), keeps=False):
    """Load as vLLM's loaders do: by slices, casts and numbers, at once or when all have come."""
    target, reading = torch.zeros(4, dtype=torch.bfloat16), ReadWeights()
    with torch.no_grad(), reading:
        arriving = reading.watch(weights)
        for name, weight in list(arriving) if keeps else arriving:
            if name in skipped:
                assert weight.shape and weight[1:].view(-1).is_contiguous()
            elif name == "o.bias":
                target[0].fill_(weight[2].item())
            else:
                target[1:].copy_(weight[1:])
    return reading.unread


def staged():
    """Views of one staging copy."""
    return zip(NAMES, torch.arange(16.0).split(4), strict=True)


def streamed():
    """A later weight comes to lie where an earlier one was."""
    return ((name, torch.arange(4.0).clone()) for name in NAMES)


@pytest.mark.parametrize("keeps", [False, True], ids=["at once", "all together"])
@pytest.mark.parametrize("weights", [staged, streamed])
def test_skipped_weights_are_known(weights, keeps):
    assert load(weights(), keeps=keeps) == set()
    for name in NAMES:
        assert load(weights(), skipped=[name], keeps=keeps) == {name}


def test_the_refusal_names_a_weight_and_vllms_model():
    check_read(set(), "Tiny")
    with pytest.raises(ValueError, match=r"^vLLM's Tiny has no place for 2 weights .*, such as a.bias, and would .*; "):
        check_read({"b.bias", "a.bias"}, "Tiny")
