"""The microbatches of a batch, one after another on a policy's device. The pixels, routes and teachers' tables of a
whole batch may take more memory than a GPU has."""

from collections.abc import Iterable, Iterator

from learner.model.microbatch import Microbatch
from learner.model.policy import Policy


class RowsInTurn(Iterable[Microbatch]):
    """Rows wait in host memory until they are computed. May be iterated several times."""

    def __init__(self, policy: Policy, microbatches: Iterable[Microbatch]) -> None:
        self._device = policy.device
        self._prepared = [policy.prepare(each) for each in microbatches]

    def __len__(self) -> int:
        return len(self._prepared)

    def __iter__(self) -> Iterator[Microbatch]:
        for prepared in self._prepared:
            yield prepared.to(self._device)
