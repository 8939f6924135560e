"""Two ranks for the tests of a file."""

from collections.abc import Iterator

import pytest

from learner.certify.ranks import Pair
from tests.harness.certified import two_ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two ranks, which stay for all tests of a file."""
    with two_ranks() as pair:
        yield pair
