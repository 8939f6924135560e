"""When FSDP gathers weights and reduces gradients, as `learner.gather` says: in each pass (`pass`, or an undecided
`auto`), or in a batch's first and last pass (`batch`). With a number, parameters outside of the blocks are gathered
and reduced as with `batch`. The last so many blocks stay gathered too, but each backward pass reduces their gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from learner.model import loading


def blocks_held(model: PreTrainedModel, gather: str | int) -> list[nn.Module]:
    """Blocks that stay gathered between the passes of a batch."""
    if isinstance(gather, int):
        blocks = loading.blocks(model)
        return blocks[max(0, len(blocks) - gather) :]
    return loading.all_blocks(model) if gather == "batch" else []


class Gathering:
    """`held`: of `blocks_held`. No pass reaches `idle` parts."""

    def __init__(
        self, module: nn.Module, gather: str | int, held: Sequence[nn.Module] = (), idle: Sequence[nn.Module] = ()
    ) -> None:
        assert isinstance(module, FSDPModule), "fully_shard makes it one"
        self._module, self._gather = module, "pass" if gather == "auto" else gather
        self._parts = [module, *(part for part in held if isinstance(part, FSDPModule))]
        self._idle = [part for part in idle if isinstance(part, FSDPModule)]
        self._held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Surrounds all passes of a batch; afterwards every weight is a shard."""
        self._held = self._gather != "pass"
        try:
            yield
        finally:
            self._held = False
            self.reshard()

    def reshard(self) -> None:
        """Give up gathered weights, unless `held`: only a backward pass does so itself, or a forward pass with those of
        a block that does not stay.
        """
        if self._held:
            return
        for module in self._module.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.reshard()

    def reduce_after_next(self, last: bool) -> None:
        """Have the next backward pass reduce gradients if it is the batch's `last`.

        Until then replicas add up their own, and ranks, in fp32, those that are reduced once. Every pass must give each
        trained parameter a gradient, if only zeros: FSDP refuses one that the last pass alone brings, in `model.dtype`.
        """
        self._module.set_requires_all_reduce(last)
        if self._gather == "pass":
            return
        self._module.set_requires_gradient_sync(last, recurse=self._gather == "batch")
        for part in self._idle:  # FSDP would fail here, where nothing was ever gathered
            part.set_requires_gradient_sync(True)
        for part in self._parts:
            part.set_reshard_after_backward(last, recurse=False)
