"""What a rank's GPU will hold, in words and before a weight is loaded; and the microbatch that fills it.

Consumes the model's config and the learner's keys; runs the model's forward pass on the meta device, without storage or
arithmetic, to count what it keeps for the backward pass. `learner/__main__.py` calls `estimate` at the start and has
`explained` around the training; waits for nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel

from configs.schema import LearnerConfig, ModelConfig
from learner.model import attention
from learner.model.loading import blocks, skeleton

GIB = 2**30
SHARE = 0.9
"""Of the GPU's memory that `tokens_per_microbatch: auto` fills: the rest is CUDA, NCCL and gaps between tensors."""
PROBE = 64
"""Tokens of the pass on meta."""
META = attention.PREFIX + "meta"
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class OutOfMemory(RuntimeError):
    """The GPU is full; the text says of what, and what to change."""


@dataclass(frozen=True)
class PeakCandidate:
    """When memory is fullest, perhaps: bytes by consumer, of fixed size and for each token of a microbatch."""

    fixed: dict[str, int]
    by_token: dict[str, int]

    def items(self, tokens: int) -> dict[str, int]:
        grown = {name: size * tokens for name, size in self.by_token.items()}
        return {name: self.fixed.get(name, 0) + grown.get(name, 0) for name in self.fixed | grown}

    def total(self, tokens: int) -> int:
        return sum(self.items(tokens).values())


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank's GPU at its fullest: at the head, or in a block's backward pass.

    Example: `Estimate([PeakCandidate({"optimizer": 12 << 30}, {"activations": 1 << 20})]).total(8192) == 20 << 30`
    """

    moments: list[PeakCandidate]

    def total(self, tokens: int) -> int:
        """Bytes for microbatches of `tokens`."""
        return max(moment.total(tokens) for moment in self.moments)

    def fit(self, room: int) -> int:
        """The largest microbatch in `room` bytes, in tokens, rounded down to 256; 0 or less where nothing fits."""
        fits = [(room - m.total(0)) // max(sum(m.by_token.values()), 1) for m in self.moments]
        return min(fits) // 256 * 256

    def words(self, tokens: int) -> str:
        """For people, largest first: `31.0 GiB = 17.3 optimizer + 8.6 weights + ...`."""
        fullest = max(self.moments, key=lambda moment: moment.total(tokens))
        sizes = sorted(fullest.items(tokens).items(), key=lambda item: -item[1])
        return f"{self.total(tokens) / GIB:.1f} GiB = " + " + ".join(f"{size / GIB:.1f} {name}" for name, size in sizes)


def estimate(model: ModelConfig, learner: LearnerConfig, world: int, reference: bool = False) -> Estimate:
    """The estimate for one of `world` ranks. `reference`: a frozen copy of the model is kept too."""
    shape, width = skeleton(model, META), getattr(torch, model.dtype).itemsize
    number = shape.num_parameters()
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in blocks(shape)]
    root, block = number - sum(sizes), max(sizes)
    head = shape.get_output_embeddings().weight.numel()  # type: ignore[no-untyped-call]
    chunk = learner.head_chunk_tokens * shape.config.get_text_config().vocab_size
    kept, working = _activations(shape, model, learner)
    here = 0 if learner.cpu_offload else 1
    always = {
        "weights": 4 * number * here * (1 + reference) // world,
        "gradients": 4 * number * here // world,
        "optimizer": 8 * number * here // world,
    }
    gathered = width * (root * (1 + reference) + 2 * block)
    return Estimate([
        # the head's gradient in fp32 and as it leaves, and the logits of a chunk with theirs: at the end of the forward
        # pass or the start of the backward pass, whichever makes them, while all activations are kept
        PeakCandidate(always | {"gathered weights": gathered, "head": (4 + width) * (head + chunk)}, {"activations": kept}),
        # a block's gradient as it is, in fp32 to be reduced, and that of the output embedding, which waits for the end
        PeakCandidate(
            always | {"gathered weights": gathered + width * block, "head": width * head,
                      "block's gradient": (4 + width) * block},
            {"activations": kept, "backward pass": working},
        ),
    ])  # fmt: skip


def _activations(shape: PreTrainedModel, model: ModelConfig, learner: LearnerConfig) -> tuple[int, int]:
    """Bytes a token keeps for the backward pass, and bytes one block's backward pass works with."""
    every, products, inputs = _traced(shape.to(getattr(torch, model.dtype)))
    layers = len(blocks(shape))
    width = getattr(torch, model.dtype).itemsize * shape.config.get_text_config().hidden_size
    working = 3 * products // (2 * layers)
    if learner.activation_checkpointing == "block":
        return (layers + 2) * width, working + every // layers  # 2: what the last norm keeps
    if learner.compile:  # the compiler keeps what goes into products and what comes of them
        return min(products + inputs, every), working
    if learner.activation_checkpointing == "selective":
        return min(products + layers * width, every), working + max(every - products, 0) // layers
    return every, working


def _traced(shape: PreTrainedModel) -> tuple[int, int, int]:
    """Bytes a token that the forward pass keeps: all; what products and attention make; what else goes into products.

    Tensors are told apart by their storages, which stay alive here so that none takes another's place.
    """
    fixed = {tensor.untyped_storage()._cdata for tensor in [*shape.parameters(), *shape.buffers()]}
    kept: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    tokens = torch.zeros(1, PROBE, dtype=torch.int64, device="meta")
    with _Products() as products, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder = shape.get_decoder()  # type: ignore[no-untyped-call]
        decoder(input_ids=tokens, position_ids=tokens, use_cache=False, made=made)
    made |= products.made
    inputs = {place: x for place, x in products.given.items() if place not in fixed | made.keys()}
    every = {place: x for place, x in kept.items() if place not in fixed}
    return tuple(sum(x.untyped_storage().nbytes() for x in found.values()) // PROBE for found in (every, made, inputs))  # type: ignore[return-value]


class _Products(TorchDispatchMode):
    """Collects what goes into matrix products and what comes of them, by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.made[answer.untyped_storage()._cdata] = answer
            for tensor in args:
                if isinstance(tensor, Tensor):
                    self.given[tensor.untyped_storage()._cdata] = tensor
        return answer


class _Attention(torch.autograd.Function):
    """Keeps what variable-length attention keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, made: dict[int, Tensor]) -> Tensor:
        answer = torch.empty_like(query)
        norms = query.new_empty(query.shape[:2], dtype=torch.float32)
        made.update({tensor.untyped_storage()._cdata: tensor for tensor in (answer, norms)})
        ctx.save_for_backward(query, key, value, answer, norms)
        return answer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("there is no backward pass on meta")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> attention.Answer:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    answer = _Attention.apply(q, k, v, kwargs["made"])  # type: ignore[no-untyped-call]
    return answer[None], None


AttentionInterface.register(META, _attend)


@contextmanager
def explained(estimate: Estimate, tokens: int) -> Iterator[None]:
    """Have torch's words for a full GPU say what fills it and which key to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the GPU is full: {str(error).splitlines()[0].partition('. ')[0]}. A rank should take "
            f"{estimate.words(tokens)}. Lower learner.tokens_per_microbatch ({tokens}), set "
            "learner.activation_checkpointing: block, or raise learner.ranks"
        ) from None
