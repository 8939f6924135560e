"""When FSDP gathers weights and reduces gradients: in each pass or, with `learner.gather: batch` (`once`), at a batch's
first and last pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


class Gathering:
    """No pass reaches `idle` parts."""

    def __init__(self, module: nn.Module, once: bool, idle: Sequence[nn.Module] = ()) -> None:
        assert isinstance(module, FSDPModule), "fully_shard makes it one"
        self._module, self._once = module, once
        self._idle = [part for part in idle if isinstance(part, FSDPModule)]
        self._held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Surrounds all passes of a batch; afterwards every weight is a shard."""
        self._held = self._once
        try:
            yield
        finally:
            self._held = False
            self.reshard()

    def reshard(self) -> None:
        """Give up gathered weights, unless `held`: only a backward pass does so itself."""
        if self._held:
            return
        for module in self._module.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.reshard()

    def reduce_after_next(self, last: bool) -> None:
        """Have the next backward pass reduce gradients if it is the batch's `last`.

        Until then replicas (with `once`, ranks in fp32) add up their own. Every pass must give each trained parameter a
        gradient, if only zeros: FSDP refuses one that the last pass alone brings, in `model.dtype`.
        """
        self._module.set_requires_all_reduce(last)
        if self._once:
            self._module.set_requires_gradient_sync(last)
            for part in self._idle:  # FSDP would fail here, where nothing was ever gathered
                part.set_requires_gradient_sync(True)
            self._module.set_reshard_after_backward(last)
