"""Softcaps, windows, sinks and values of another width against attention written out with a mask, gradients too."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.model import attention
from learner.model.kernels import plain
from learner.train.pictures import Placed, _blocks

STARTS = torch.tensor([0, 8, 9, 20], dtype=torch.int32)


def inputs(width: int = 4) -> list[Tensor]:
    """Queries of 4 heads, keys and values of 2, and a sink for each head."""
    draw = torch.Generator().manual_seed(1)
    shapes = (1, 4, 20, 4), (1, 2, 20, 4), (1, 2, 20, width), (4,)
    return [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    softcap: float | None,
    window: int | None,
    images: Sequence[tuple[int, int]] = (),
) -> Tensor:
    place, document = torch.arange(20), torch.bucketize(torch.arange(20), STARTS[1:].long(), right=True)
    back = place[:, None] - place
    mutual = torch.zeros(20, 20, dtype=torch.bool)
    for start, end in images:
        mutual[start:end, start:end] = True
    seen = (document[:, None] == document) & ((back >= 0) | mutual) & (back < (window or 20))
    scores = 1.5 * q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, 4, 20, 1)], -1)
    return (scores.softmax(-1)[..., :20] @ v.repeat_interleave(2, 1)).transpose(1, 2)


def same_with_gradients(got: torch.Tensor, want: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Assert that two outputs are equal, and so are the gradients of a random sum of each by `leaves`."""
    torch.testing.assert_close(got, want)
    by = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((x * by).sum(), leaves) for x in (got, want))
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("tiles", [1 << 24, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("width", [2, 4, 6])
def test_output_and_gradients(
    monkeypatch: pytest.MonkeyPatch, tiles: int, softcap: float | None, window: int | None, with_sinks: bool, width: int
) -> None:
    monkeypatch.setattr(plain, "PAIRS", tiles)
    q, k, v, sinks = inputs(width)
    given: dict[str, Any] = {"softcap": softcap, "sliding_window": window, "s_aux": sinks if with_sinks else None}
    row = {"cu_seq_lens_q": STARTS, "max_length_q": 11, "scaling": 1.5}
    got, _ = attention.ATTENTIONS["sdpa"](torch.nn.Identity(), q, k, v, None, **row, **given)
    want = written_out(q, k, v, given["s_aux"], softcap, window)
    same_with_gradients(got, want, [q, k, v, *([sinks] if with_sinks else [])])


IMAGES = [(2, 6), (9, 12), (14, 20)]
"""First and last place, not included, of images: they begin and end documents, and stand within one."""


@pytest.mark.parametrize("tiles", [1 << 24, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 6, 8])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_tokens_of_an_image_see_each_other(
    monkeypatch: pytest.MonkeyPatch, tiles: int, softcap: float | None, window: int | None, with_sinks: bool
) -> None:
    """And what is before them in their document and window; text sees no later token."""
    monkeypatch.setattr(plain, "PAIRS", tiles)
    q, k, v, sinks = inputs()
    given: dict[str, Any] = {"softcap": softcap, "sliding_window": window, "s_aux": sinks if with_sinks else None}
    pictures = [SimpleNamespace(num_tokens=end - start) for start, end in IMAGES]
    placed: Any = [
        Placed(start, picture, int(STARTS[start >= STARTS][-1]))
        for (start, _), picture in zip(IMAGES, pictures, strict=True)
    ]
    row = {"cu_seq_lens_q": STARTS, "max_length_q": 11, "scaling": 1.5, "image_blocks": _blocks(placed)}
    got, _ = attention.ATTENTIONS["sdpa"](torch.nn.Identity(), q, k, v, None, **row, **given)
    want = written_out(q, k, v, given["s_aux"], softcap, window, IMAGES)
    same_with_gradients(got, want, [q, k, v, *([sinks] if with_sinks else [])])


@pytest.mark.parametrize("name", ["varlen", "flash", "flash4"])
def test_a_fused_kernel_refuses_a_softcap(name: str) -> None:
    q, k, v, _ = inputs()
    row = {"cu_seq_lens_q": STARTS, "max_length_q": 11}
    with pytest.raises(ValueError, match=r"Identity has a softcap, which learner\.attention sdpa alone computes"):
        attention.ATTENTIONS[name](torch.nn.Identity(), q, k, v, None, **row, softcap=2.0)
