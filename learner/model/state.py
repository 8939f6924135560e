"""Layers that keep a state: convolutions, gated delta rules and state space models, computed document by document.

In a packed row such a layer would go on from one document to the next. Where no kernel takes bounds
(`bounded_state.py`), documents of similar length are the sequences of a batch, padded on the right, which no earlier
token sees: this is exact on any device, but waits for the GPU to read bounds. Classes are listed by name; the trial of
`exactness.py` refuses others.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from configs.load import ConfigError
from learner.model import bounds
from learner.model.bounded_state import check, in_torch, replaced, slow_because, takes_bounds, within
from learner.model.bounds import BOUNDS

log = logging.getLogger(__name__)
KEEPS_STATE = re.compile(
    r"(GatedDeltaNet|DeltaAttention|ShortConv|Mamba2?Mixer|MambaLayer|BambaMixer|FalconH1Mixer|RecurrentBlock)$"
)
"""Ends of transformers' class names of such layers."""
KERNELS = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages whose kernels transformers takes for such layers, if installed."""
PADDED = 1.25
"""Longest length of documents computed together, relative to their shortest."""
META_DOCUMENT = 1024
"""Tokens of a document whose memory is counted. State spaces take more for longer ones, but far less than their largest
products until about 32,768.
"""
PROVEN = set[type[nn.Module]]()
"""Classes whose kernels this process has compared."""
Span = tuple[int, int]
"""A document's first token, and the one after its last."""


def use_torch_alone() -> None:
    """Keep transformers from KERNELS, which run on GPUs alone. Call it before the model's code is imported."""
    for name in KERNELS:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails


def layers_of(block: nn.Module) -> list[nn.Module]:
    """A block's layers that keep a state."""
    return [layer for layer in block.modules() if KEEPS_STATE.search(type(layer).__name__)]


def kinds(model: nn.Module) -> list[str]:
    """Class names of layers that keep a state. Example: `["Lfm2ShortConv"]`"""
    return sorted({type(layer).__name__ for layer in layers_of(model)})


def report(model: nn.Module, device: torch.device) -> None:
    """Warn where a GPU computes such layers without kernels for them."""
    if device.type == "cuda" and (why := slow_because(layers_of(model))):
        log.warning(
            "layers that keep a state take transformers' torch functions, several times slower than kernels: %s", why
        )


def attends(block: nn.Module) -> bool:
    names = {type(layer).__name__ for layer in block.modules()}
    return any("Attention" in name and not KEEPS_STATE.search(name) for name in names)


def products(layer: Any) -> int:
    """Multiplications of a token with a layer's state, beside those by its weights.

    A delta rule reads its state [heads, key, value] twice and writes it once; a state space reads and writes [heads,
    head_dim, state] once; a convolution has weights alone.
    """
    if hasattr(layer, "head_k_dim"):
        return int(3 * layer.num_v_heads * layer.head_k_dim * layer.head_v_dim)
    if type(layer).__name__.endswith("DeltaAttention"):
        return int(3 * layer.num_heads * layer.head_dim**2)
    if hasattr(layer, "ssm_state_size"):
        wide = layer.num_heads * layer.head_dim if hasattr(layer, "num_heads") else layer.intermediate_size
        return int(2 * wide * layer.ssm_state_size)
    return 0


def separate(blocks: Iterable[nn.Module]) -> None:
    """Have layers that keep a state see each document alone. Blocks note the bounds."""
    for block in blocks:
        for layer in layers_of(block):
            layer.forward = _by_document(layer, layer.forward)  # type: ignore[method-assign]


def _by_document(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # reads the bounds
    def separated(*args: Any, **kwargs: Any) -> Any:
        starts, _, shared, group = bounds.of_row(layer, {})
        if shared is not None:
            problem = f"the model's {type(layer).__name__} keeps a state, and answers would not see their prompt's"
            raise ConfigError([f"learner.share_prompts: {problem}; set it to false"])
        if group is not None:
            problem = f"the model's {type(layer).__name__} keeps a state, which ranks do not exchange"
            raise ConfigError([f"learner.context_parallel: {problem}; set it to 1"])
        ours = *BOUNDS, "shared_prompts", "context_group"
        given = args, {name: x for name, x in kwargs.items() if name not in ours}
        hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if starts.is_meta:  # to count memory; kernels would read it
            with replaced(layer, in_torch(layer)):
                return _in_batches(forward, given, hidden.shape[1], _meta_batches(hidden.shape[1]))
        if takes_bounds(layer):
            _prove(layer, forward, hidden)
            with replaced(layer, within(layer, starts)):
                return forward(*given[0], **given[1])
        return _in_batches(forward, given, hidden.shape[1], _batches(starts))

    return separated  # type: ignore[no-any-return]


def _in_batches(
    forward: Callable[..., Any], given: tuple[Any, Any], tokens: int, batches: Iterable[tuple[Tensor, Tensor]]
) -> Any:
    """Call `forward` with documents as sequences of batches; returns the row in order."""
    places, outputs = [], []
    for index, real in batches:

        def padded(x: Tensor, index: Tensor = index) -> Tensor:
            return x[0][index] if x.shape[:2] == (1, tokens) else x

        part_args, part_kwargs = tree_map_only(Tensor, padded, given)
        output = forward(*part_args, **part_kwargs)
        outputs.append((output[0] if isinstance(output, tuple) else output).flatten(0, 1)[real])
        places.append(index.flatten()[real])
    whole = torch.cat(outputs)[torch.cat(places).argsort()][None]
    return (whole, *(None for _ in output[1:])) if isinstance(output, tuple) else whole


def _prove(layer: nn.Module, forward: Callable[..., Any], hidden: Tensor) -> None:
    """Compare a class's kernels with torch functions, once in this process."""
    if hidden.is_cuda and type(layer) not in PROVEN:
        check(layer, forward, hidden)
        PROVEN.add(type(layer))


def _batches(starts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Documents of similar length: places in the row, [documents, longest] int64; numbers of places that are no
    padding, [tokens].
    """
    for spans in _similar(list(pairwise(starts.tolist()))):
        first, end = torch.tensor(spans, device=starts.device).T
        position = torch.arange(max(b - a for a, b in spans), device=starts.device)
        index = first[:, None] + position
        yield index.minimum(end[:, None] - 1), (index < end[:, None]).flatten().nonzero()[:, 0]


def _meta_batches(tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`_batches` on meta, with documents of META_DOCUMENT tokens."""
    number = tokens // META_DOCUMENT if tokens % META_DOCUMENT == 0 else 1
    places = torch.empty(tokens, dtype=torch.int64, device="meta")
    yield places.view(number, -1), places


def _similar(spans: Sequence[Span]) -> list[list[Span]]:
    """Groups of documents whose longest is at most PADDED times the shortest."""
    groups: list[list[Span]] = []
    for start, end in sorted(spans, key=lambda span: span[1] - span[0]):
        if groups and end - start <= PADDED * (groups[-1][0][1] - groups[-1][0][0]):
            groups[-1].append((start, end))
        else:
            groups.append([(start, end)])
    return groups
