"""The microbatches of a batch, one after another on a policy's device. The pixels, routes and teachers' tables of a
whole batch may take more memory than a GPU has."""

from collections.abc import Iterable, Iterator, Sequence

from learner.model.microbatch import Microbatch
from learner.model.policy import Policy


class RowsInTurn(Iterable[Microbatch]):
    """Rows are prepared once, and copied to the device each time that they are computed. May be iterated several
    times."""

    def __init__(self, policy: Policy, microbatches: Sequence[Microbatch]) -> None:
        self._policy, self._microbatches = policy, microbatches
        self._prepared: list[Microbatch] = []

    def __len__(self) -> int:
        return len(self._microbatches)

    def __iter__(self) -> Iterator[Microbatch]:
        for index, microbatch in enumerate(self._microbatches):
            if index == len(self._prepared):  # meanwhile the GPU computes the row before it
                self._prepared.append(self._policy.prepare(microbatch))
            yield self._prepared[index].to(self._policy.device)
