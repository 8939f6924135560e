"""Many copies with few launches: the same bytes as one by one, and not much memory waits for its launch."""

import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.weights import copying
from learner.weights.copying import copy_in_turn
from tests.harness.counted_calls import CountedCalls

DTYPES = torch.float32, torch.bfloat16, torch.int64


copies = st.tuples(
    st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans()
)


@given(st.lists(copies, max_size=8), st.integers(0, 2**31))
def test_targets_get_the_bytes_of_single_copies(given_copies, seed):
    draw = torch.Generator().manual_seed(seed)
    pairs, want = [], []
    for shape, into, out_of, transposed in given_copies:
        source = (9 * torch.randn(shape[::-1] if transposed else shape, generator=draw)).to(out_of)
        source = source.permute(list(reversed(range(len(shape))))) if transposed else source
        pairs.append((torch.zeros(shape, dtype=into), source))
        want.append(torch.zeros(shape, dtype=into).copy_(source))
    copy_in_turn(iter(pairs))
    assert all(torch.equal(target, right) for (target, _), right in zip(pairs, want, strict=True))


def test_many_copies_are_few_launches():
    pairs = [(torch.zeros(3, dtype=torch.bfloat16), torch.ones(3)) for _ in range(50)]
    pairs += [(torch.zeros(3), torch.ones(3)) for _ in range(50)]
    with CountedCalls() as calls:
        copy_in_turn(pairs)
    assert calls.names == ["aten::_foreach_copy_"] * 2


def test_sources_are_freed_after_a_few():
    """Sources that share a storage count once."""
    size = copying.HELD_BYTES // 4 + 1
    waiting: list[weakref.ref[torch.UntypedStorage]] = []

    def made():
        for _ in range(10):
            memory = torch.ones(size, dtype=torch.uint8)
            waiting.append(weakref.ref(memory))
            for part in memory.split(size // 2):
                assert sum(each() is not None for each in waiting) <= 4
                yield torch.zeros_like(part), part
            del memory, part

    with CountedCalls() as calls:
        copy_in_turn(made())
    assert calls.names.count("aten::_foreach_copy_") == 4
