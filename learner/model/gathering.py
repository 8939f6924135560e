"""When a sharded module's weights are gathered, and its gradients reduced.

FSDP does both in each pass; with `learner.gather: batch` (`once`) a batch's first pass gathers, and its last one
reduces.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


class Gathering:
    """No pass reaches the parts `idle`."""

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
        """Give up what is gathered, outside `held`: only a backward pass does it by itself."""
        if self._held:
            return
        for module in self._module.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.reshard()

    def reduce_after_next(self, last: bool) -> None:
        """Have the next backward pass reduce gradients if it is the `last` of the batch.

        Until then each replica, or with `once` each rank in fp32, adds up its own. Every pass must give every trained
        parameter a gradient, if only zeros: FSDP refuses one that the last pass alone brings, in `model.dtype`.
        """
        self._module.set_requires_all_reduce(last)
        if self._once:
            self._module.set_requires_gradient_sync(last)
            for part in self._idle:  # FSDP would fail here, where nothing was ever gathered
                part.set_requires_gradient_sync(True)
            self._module.set_reshard_after_backward(last)
