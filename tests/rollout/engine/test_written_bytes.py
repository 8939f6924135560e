"""A load in place that brings a part of a layer: seen by the bytes that it writes."""

import weakref

import pytest
import torch

from rollout.engine.written_bytes import WrittenBytes


def written(parameter, *loads):
    with torch.no_grad(), WrittenBytes([parameter]) as found:
        for load in loads:
            load(parameter.data)
    return found


def rows(first, last):
    return lambda data: data[first:last].copy_(torch.ones(last - first, *data.shape[1:], dtype=torch.float64))


@pytest.mark.parametrize(
    ("loads", "is_part"),
    [
        ((), False),
        ((rows(0, 6),), False),
        ((rows(0, 2), rows(2, 5), rows(5, 6)), False),
        ((rows(0, 4), rows(2, 6), rows(0, 1)), False),
        ((rows(0, 2), lambda data: data[2:].fill_(0)), False),
        ((rows(0, 5),), True),
        ((rows(0, 2), rows(3, 6)), True),
        ((rows(1, 6), rows(1, 3)), True),
        ((rows(0, 5), lambda data: data[5].add_(1)), False),
        ((rows(0, 5), lambda data: data[:, 1].copy_(torch.ones(6))), False),
    ],
    ids=["nothing", "whole", "in parts", "overlapping", "filled", "an end", "a hole", "a begin", "added", "columns"],
)
def test_a_part_of_a_matrix_is_seen(loads, is_part):
    """What other operations write is not known, and then no matrix is said to lack anything."""
    parameter = torch.nn.Parameter(torch.zeros(6, 3, dtype=torch.bfloat16))
    assert written(parameter, *loads).is_part(parameter) is is_part


@pytest.mark.parametrize("padding", [0, 2])
def test_experts_of_which_one_lacks_a_half_are_seen(padding):
    """Padding of each expert, which nobody writes, is no difference between them."""
    experts = torch.nn.Parameter(torch.zeros(4, 6 + padding, 3))
    second = 3 + padding // 2
    halves = [(expert, begin) for expert in range(4) for begin in (0, second)]

    def load(wanted):
        return written(experts, *(lambda data, e=e, b=b: data[e, b : b + 3].copy_(torch.ones(3, 3)) for e, b in wanted))

    assert not load(halves).is_uneven(experts) and not load(()).is_uneven(experts)
    for left_out in halves:
        assert load([half for half in halves if half != left_out]).is_uneven(experts)
    for begin in (0, second):
        assert load([half for half in halves if half[1] == begin]).is_uneven(experts), "gate or up of all experts alike"


def test_no_tensor_of_the_load_is_kept():
    """A folder's tensors together may be larger than the host's memory."""
    parameter, known = torch.nn.Parameter(torch.zeros(2, 2)), []

    def load(data):
        tensor = torch.ones(2, 2)
        known.append(weakref.ref(tensor))
        data.copy_(tensor)

    found = written(parameter, load)
    assert known[0]() is None and not found.is_part(parameter) and parameter.sum() == 4
