"""What one block's forward and backward pass hold, traced on the meta device without the other blocks.

Tracing shows what torch computes eagerly, so compiled blocks are estimated (`compiled_trace.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from learner.model import state
from learner.model.alive import Alive, Line, lines
from learner.model.compiled_trace import Flow
from learner.model.loading import blocks

TOKENS = 1024
"""Length of the shorter of two traced rows; the other is twice as long."""


@dataclass(frozen=True)
class BlockTrace:
    kept: int
    """Bytes per token, from forward to backward pass."""
    moments: tuple[Line, ...]
    """Peaks of the block, whose gradients are in the fixed part."""


@dataclass(frozen=True)
class ModelTrace:
    """All blocks in order, and bytes per token outside of them."""

    blocks: tuple[BlockTrace, ...]
    ends: int

    def scaled(self, factor: float) -> "ModelTrace":
        def of(block: BlockTrace) -> BlockTrace:
            moments = (Line(round(factor * line.fixed), round(factor * line.per_token)) for line in block.moments)
            return BlockTrace(round(factor * block.kept), tuple(moments))

        return ModelTrace(tuple(map(of, self.blocks)), round(factor * self.ends))


def trace_model(empty: PreTrainedModel, decode: Callable[[int], Tensor]) -> ModelTrace:
    """Trace each kind of block of `empty`, on meta. `decode`: number of tokens -> final hidden states."""
    every, traced = blocks(empty), dict[Any, BlockTrace]()
    ends = _Run.of(empty, decode, None)
    for number, block in enumerate(every):
        if _kind(block) not in traced:
            run = _Run.of(empty, decode, number)
            traced[_kind(block)] = BlockTrace(run.kept - ends.kept, tuple(run.moments))
    return ModelTrace(tuple(traced[_kind(block)] for block in every), ends.kept)


def trace_compiled(empty: PreTrainedModel, decode: Callable[[int], Tensor], recomputed: bool) -> ModelTrace:
    """`trace_model` for compiled blocks. `recomputed`: only a block's input is kept; `empty` then recomputes too, for
    layers that keep a state are not compiled.
    """
    every, traced = blocks(empty), dict[Any, BlockTrace]()
    ends = _Run.of(empty, decode, None)
    for number, block in enumerate(every):
        if _kind(block) not in traced and state.layers_of(block):  # not compiled
            run = _Run.of(empty, decode, number)
            traced[_kind(block)] = BlockTrace(run.kept - ends.kept, tuple(run.moments))
        elif _kind(block) not in traced:
            kept, working, width = _flow(empty, decode, number)
            gradients = sum(p.numel() * p.element_size() for p in block.parameters() if p.requires_grad)
            # adds the output's gradient; a recomputed block's own input is not kept before
            moment = Line(gradients, kept + working + width)
            traced[_kind(block)] = BlockTrace(width if recomputed else kept, (moment,))
    return ModelTrace(tuple(traced[_kind(block)] for block in every), ends.kept)


def _flow(empty: PreTrainedModel, decode: Callable[[int], Tensor], number: int) -> tuple[int, int, int]:
    """Bytes per token: kept by the compiler, added in the backward pass, the block's input."""
    flow, widths = Flow([*empty.parameters(), *empty.buffers()]), list[int]()

    def start(block: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        widths.append(hidden.nbytes // TOKENS)
        flow.begin(hidden)

    def stop(block: nn.Module, args: Any, output: Any) -> None:
        flow.end()

    with _alone(empty, number):
        block, embedding = blocks(empty)[number], empty.get_input_embeddings()
        recomputed = getattr(block, "gradient_checkpointing", False)
        block.gradient_checkpointing = False  # type: ignore[assignment]
        hooks = [block.register_forward_pre_hook(start, with_kwargs=True), block.register_forward_hook(stop)]
        hooks.append(embedding.register_forward_hook(_differentiate))
        with flow, flow.hooks:
            loss = _Loss.apply(decode(TOKENS))  # type: ignore[no-untyped-call]
            loss.backward()
        for hook in hooks:
            hook.remove()
        block.gradient_checkpointing = recomputed  # type: ignore[assignment]
        empty.zero_grad(set_to_none=True)
    return flow.kept_bytes // TOKENS, flow.working_bytes // TOKENS, widths[0]


def _kind(block: nn.Module) -> Any:
    """Classes of layers distinguish convolutions from attention."""
    layers = tuple(type(layer).__name__ for layer in block.modules())
    return layers, tuple((tuple(p.shape), p.requires_grad) for p in block.parameters())


@dataclass(frozen=True)
class _Run:
    kept: int
    moments: list[Line]

    @classmethod
    def of(cls, empty: PreTrainedModel, decode: Callable[[int], Tensor], number: int | None) -> "_Run":
        with _alone(empty, number):
            short, long = (_Passes(empty, number) for _ in range(2))
            short.run(decode, TOKENS)
            long.run(decode, 2 * TOKENS)
        kept = (long.at_head - short.at_head) // TOKENS
        return cls(kept, lines(short.within, long.within, TOKENS))


class _Passes:
    def __init__(self, empty: PreTrainedModel, number: int | None) -> None:
        self._model = empty
        self._block = None if number is None else blocks(empty)[number]
        self._alive = Alive([*empty.parameters(), *empty.buffers()])
        self._begin: int | None = None
        self._end: int | None = None
        self.at_head = 0

    @property
    def within(self) -> list[int]:
        """Levels from the block's start to the gradient of its input."""
        return self._alive.levels[self._begin : self._end]

    def run(self, decode: Callable[[int], Tensor], tokens: int) -> None:
        embedding = self._model.get_input_embeddings()
        hooks = [embedding.register_forward_hook(_differentiate)]
        if self._block is not None:
            hooks.append(self._block.register_forward_pre_hook(self._start, with_kwargs=True))
        with self._alive:
            loss = _Loss.apply(decode(tokens))  # type: ignore[no-untyped-call]
            self.at_head = self._alive.levels[-1]
            loss.backward()
        for hook in hooks:
            hook.remove()
        self._model.zero_grad(set_to_none=True)

    def _start(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._begin is None:  # a recomputation starts it again
            self._begin = len(self._alive.levels) - 1
            hidden = args[0] if args else kwargs["hidden_states"]
            hidden.register_hook(self._stop)

    def _stop(self, gradient: Tensor) -> None:
        self._end = len(self._alive.levels)


def _differentiate(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A frozen embedding has no gradient, but most blocks' inputs have one."""
    if output.requires_grad:
        return output
    anchor = torch.zeros((), device=output.device, requires_grad=True)
    grown: Tensor = _Grown.apply(output, anchor)  # type: ignore[no-untyped-call]
    return grown


class _Grown(torch.autograd.Function):
    """The same numbers with a gradient that autograd does not keep, unlike a leaf's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class _Loss(torch.autograd.Function):
    """A number whose gradient by the hidden states is one tensor, as the head's is."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.like = hidden.shape, hidden.dtype, hidden.device
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)


@contextmanager
def _alone(empty: PreTrainedModel, number: int | None) -> Iterator[None]:
    """Other blocks return their input; their other arguments live as long as the passes."""
    given: list[Any] = []
    others = [block for index, block in enumerate(blocks(empty)) if index != number]
    recomputed = [getattr(block, "gradient_checkpointing", False) for block in others]

    def passing(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given[:] = [args, kwargs]
        return hidden_states

    for block in others:
        block.gradient_checkpointing = False  # type: ignore[assignment]
        block.forward = passing  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block, before in zip(others, recomputed, strict=True):
            block.gradient_checkpointing = before  # type: ignore[assignment]
            del block.forward
