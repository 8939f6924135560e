"""The formula of MFU against a count of the multiplications that torch does."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from learner.model.flops import Costs, TowerCosts, peak
from learner.model.vision import freeze
from learner.record.metrics import Metrics
from tests.harness.tiny_vlm import KINDS, tiny_vlm
from tests.harness.world import plain, tiny_model


@pytest.mark.parametrize("tied", [False, True])
def test_formula(tmp_path: Path, tied: bool) -> None:
    """All tokens scored; transformers computes all pairs of tokens, of which causal attention needs half."""
    model, n = plain(tiny_model(tmp_path, tied)), 48
    costs = Costs.of(model)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, n, dtype=torch.int64)).logits.sum().backward()
    attention = 2 * costs.per_pair * n * n
    want = costs.per_token * n + costs.per_trainable * n + attention
    # what torch need not do: the gradient of the embedding look-up's input
    assert counter.get_total_flops() == pytest.approx(want, rel=0.02)
    assert costs.total(n, n, n * n) == pytest.approx(want - attention / 2)


def tower_flops(model: Any, grid: tuple[int, int, int], number: int) -> float:
    """What torch multiplies for some images, forward and backward."""
    config = model.config.vision_config
    if hasattr(config, "image_size"):
        given = [torch.ones(number, 3, config.image_size, config.image_size)]
    else:
        width = model.model.visual.patch_embed.proj.weight[0].numel()
        given = [torch.ones(number * prod(grid), width), torch.tensor([grid] * number)]
    with FlopCounterMode(display=False) as counter:
        found = model.model.get_image_features(*given, return_dict=True)
        deeper = [torch.cat(level) for level in getattr(found, "deepstack_features", [])]
        total = sum(x.sum() for x in [torch.cat(list(found.pooler_output)), *deeper])
        if total.requires_grad:
            total.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("parts", [[], ["vision"], ["projector"], ["vision", "projector"]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tower(tmp_path: Path, kind: str, parts: list[str]) -> None:
    """Images of whole windows, so that no window is smaller than the formula has it."""
    tiny_vlm(tmp_path, kind)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").train()
    freeze(model, parts)
    costs, grid = TowerCosts.of(model), (1, 4, 4) if kind == "gemma3" else (1, 16, 24)
    assert costs.total([prod(grid)] * 2) == pytest.approx(tower_flops(model, grid, 2), rel=0.02)


def test_peaks() -> None:
    assert peak("NVIDIA H200") == peak("NVIDIA H100 80GB HBM3") == 989e12
    assert peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak("Toaster") is None


def test_metrics_have_it() -> None:
    seconds = iter([0.0, 1.0, 3.0, 5.0])
    seen = []
    metrics = Metrics(None, [seen.append], clock=lambda: next(seconds), peak=100.0)
    with metrics.span("train"):
        pass
    record = metrics.record(1, {"flops": 50.0})
    assert record["mfu"] == pytest.approx(50 / 2 / 100) and record["mfu/version"] == pytest.approx(50 / 5 / 100)
