"""When the weights of a sharded module are gathered, and when its gradients are reduced.

FSDP gathers a block for each pass and reduces after each backward pass. With `learner.gather: batch` (`once`) the first
pass of a batch gathers for all, each rank adds up its own gradients, and the last pass reduces them. Used by whoever
runs passes: step, critic, sft and certificate.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


class Gathering:
    """Gathers and reshards the weights of `module`, which `fully_shard` has wrapped, as it has the parts `idle` of it,
    which no pass reaches."""

    def __init__(self, module: nn.Module, once: bool, idle: Sequence[nn.Module] = ()) -> None:
        assert isinstance(module, FSDPModule), "fully_shard makes it one"
        self._module, self._once = module, once
        self._idle = [part for part in idle if isinstance(part, FSDPModule)]
        self._held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around all passes of a batch. After it every weight is a shard; not where a pass was broken off in the
        middle, which ends the learner."""
        self._held = self._once
        try:
            yield
        finally:
            self._held = False
            self.reshard()

    def reshard(self) -> None:
        """Give up what is gathered, outside `held`: only a backward pass does it by itself, and readers of the weights
        want shards."""
        if self._held:
            return
        for module in self._module.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.reshard()  # of its own weights alone

    def reduce_after_next(self, last: bool) -> None:
        """Whether the next backward pass is the `last` of the batch, after which the replicas' gradients are reduced:
        once a batch, not once a microbatch. Until then each replica adds up its own; gathered once, each rank does, in
        fp32, and keeps the weights gathered.

        So every pass must give every trained parameter a gradient, if only of zeros: FSDP refuses to reduce one that
        came with the last pass alone, which is still in `model.dtype`, beside those that were added up.
        """
        self._module.set_requires_all_reduce(last)
        if self._once:
            self._module.set_requires_gradient_sync(last)
            for part in self._idle:  # FSDP looks for gradients to add up, and fails where nothing was ever gathered
                part.set_requires_gradient_sync(True)
            self._module.set_reshard_after_backward(last)
