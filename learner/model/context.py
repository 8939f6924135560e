"""Context parallelism: ranks share each packed row, so that documents may exceed one GPU's memory.

Around attention, all-to-alls exchange slices of the row for shares of the heads (Ulysses,
[2309.14509](https://arxiv.org/abs/2309.14509)): attention sees whole documents, with any kernel. A group is named by a
string, a constant for torch.compile. Exchanges are collectives of the group.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from configs.context_parallel import REMEDY, why_not
from configs.load import ConfigError
from learner.model.microbatch import Microbatch, RowSlice


class ContextGroup(NamedTuple):
    """The ranks that share this one's rows."""

    size: int
    rank: int
    group: Any
    """None where nothing is computed."""
    world: Any


GROUPS: dict[str, ContextGroup] = {}


def join(size: int, timeout: timedelta) -> str:
    """Form groups of `size` consecutive ranks, once; a collective of all ranks."""
    for name, own in GROUPS.items():
        if own.size == size and own.world is dist.group.WORLD:
            return name
    group, _ = dist.new_subgroups(group_size=size, timeout=timeout)
    name = f"context-{len(GROUPS)}"
    GROUPS[name] = ContextGroup(size, dist.get_rank(group), group, dist.group.WORLD)
    return name


def planned(size: int) -> str:
    """Name a group whose ranks need not exist, for passes on the meta device."""
    name = f"planned-{size}"
    GROUPS[name] = ContextGroup(size, 0, None, None)
    return name


def gathered(q: Tensor, k: Tensor, v: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """[tokens of the slice, heads, head_dim] -> [tokens of the row, own heads, head_dim]. Raises ConfigError if the
    ranks cannot share the heads.
    """
    size, _ = size_and_rank(name)
    if problem := why_not(q.shape[1], k.shape[1], size):
        raise ConfigError([f"learner.context_parallel: {problem}; {REMEDY}"])
    return to_heads(q, name), to_heads(k, name), to_heads(v, name)


def scattered(out: Tensor, heads: int, name: str) -> Tensor:
    result: Tensor = to_tokens(out, heads, name)
    return result


def own_heads(values: Tensor, name: str) -> Tensor:
    """This rank's part of `values` [heads]; others have no gradient here."""
    size, rank = size_and_rank(name)
    share = len(values) // size
    return values[rank * share : (rank + 1) * share]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # the compiler would make the numbers symbols
def size_and_rank(name: str) -> tuple[int, int]:
    return GROUPS[name].size, GROUPS[name].rank


@torch.library.custom_op("headrace::to_heads", mutates_args=())
def to_heads(x: Tensor, name: str) -> Tensor:
    """[slice, heads, width] -> [row, heads / ranks, width], at least one head."""
    own, (tokens, heads, width) = GROUPS[name], x.shape
    if heads < own.size:
        x = x.repeat_interleave(own.size // heads, 1)
    sent = x.reshape(tokens, own.size, -1, width).transpose(0, 1).contiguous()
    return _exchanged(sent, own).view(own.size * tokens, -1, width)


@to_heads.register_fake
def _(x: Tensor, name: str) -> Tensor:
    size, _ = size_and_rank(name)
    return x.new_empty(size * x.shape[0], max(x.shape[1] // size, 1), x.shape[2])


@torch.library.custom_op("headrace::to_tokens", mutates_args=())
def to_tokens(x: Tensor, heads: int, name: str) -> Tensor:
    """[row, heads / ranks, width] -> [slice, heads, width]; adds copies of a head in float32."""
    own, (tokens, share, width) = GROUPS[name], x.shape
    received = _exchanged(x.reshape(own.size, tokens // own.size, share, width).contiguous(), own)
    whole = received.transpose(0, 1).reshape(tokens // own.size, -1, width).contiguous()
    if whole.shape[1] == heads:
        return whole
    total = torch.promote_types(x.dtype, torch.float32)
    return whole.view(len(whole), heads, -1, width).sum(2, dtype=total).to(x.dtype)


@to_tokens.register_fake
def _(x: Tensor, heads: int, name: str) -> Tensor:
    size, _ = size_and_rank(name)
    return x.new_empty(x.shape[0] // size, heads, x.shape[2])


def _exchanged(sent: Tensor, own: ContextGroup) -> Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=own.group)
    return received


def _keep_heads(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.name = inputs
    ctx.heads = x.shape[1]


def _keep_name(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.name = inputs[2]


to_heads.register_autograd(lambda ctx, grad: (to_tokens(grad, ctx.heads, ctx.name), None), setup_context=_keep_heads)
to_tokens.register_autograd(lambda ctx, grad: (to_heads(grad, ctx.name), None, None), setup_context=_keep_name)


def cut(row: Microbatch, name: str) -> Microbatch:
    """Fill a row on the CPU up to equal slices, and add this rank's."""
    (size, rank), filled_from = size_and_rank(name), len(row.tokens)
    row = _filled_up(row, -filled_from % size)
    width = len(row.tokens) // size
    start, stop = rank * width, (rank + 1) * width
    mine = (row.predictor >= start) & (row.predictor < stop)
    scored, predictor = row.scored[mine], row.predictor[mine] - start
    return replace(row, own=RowSlice(name, start, stop, scored, predictor, filled_from))


def _filled_up(row: Microbatch, number: int) -> Microbatch:
    if not number:
        return row
    values: dict[str, float] = {"tokens": 0, "sampled": False, "behaviour": 0.0, "versions": -1, "sequence": 0}
    values["turn"] = -1
    longer: dict[str, Any] = {name: pad(getattr(row, name), (0, number), value=x) for name, x in values.items()}
    end = row.cu_seqlens[-1:] + number
    return replace(
        row,
        **longer,
        positions=torch.cat([row.positions, torch.arange(number)]),
        cu_seqlens=torch.cat([row.cu_seqlens, end]),
        max_seqlen=max(row.max_seqlen, number),
        routes=None if row.routes is None else pad(row.routes, (0, 0, 0, number)),
    )


def whole(values: Tensor, name: str) -> Tensor:
    """Sum `values` [tokens of the row] over the ranks. Each rank's gradient is that of its own."""
    return _Whole.apply(values, name)  # type: ignore[no-untyped-call, no-any-return]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, name: str) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=GROUPS[name].group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def check_same(digest: int, name: str) -> None:
    """Raise RuntimeError unless all ranks of the group have the same `digest`."""
    own = GROUPS[name]
    both = torch.tensor([digest, -digest])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=own.group)
    if both[0] != -both[1]:
        raise RuntimeError(f"the {own.size} ranks that share rows (learner.context_parallel) have other samples each")
