"""A model under FSDP whose ranks each publish their own rows: every worker's bytes are those that the ranks gather."""

from pathlib import Path

import pytest
import torch

from configs.schema import LoraConfig
from tests.harness import world
from tests.harness.expert_batches import expert_model
from tests.harness.world import tiny_model


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("ranks", "on", "workers", "kind"),
    [(2, 2, 1, "tied"), (3, 3, 2, "untied"), (4, 2, 1, "replicas"), (2, 2, 2, "adapter"), (3, 3, 1, "experts")],
)
def test_workers_get_what_the_ranks_would_gather(tmp_path: Path, ranks: int, on: int, workers: int, kind: str) -> None:
    """Three ranks share rows, and the eight experts of a layer, unevenly. (4, 2): two copies of the model, of which
    one sends."""
    if kind == "experts":
        model = expert_model(tmp_path / "model").model_copy(update={"dtype": "bfloat16"})
    else:
        model = tiny_model(tmp_path / "model", tied=kind == "tied", dtype=torch.bfloat16)
    if kind == "adapter":
        model = model.model_copy(update={"lora": LoraConfig(rank=3)})
    world.together("rows", ranks, tmp_path, model=model.model_dump(mode="json"), on=on, workers=workers)
    held = torch.load(tmp_path / "held.pt")
    assert held[on:] == [0] * (ranks - on) and min(held[:on]) > 0
    assert max(held[:on]) - min(held[:on]) < 0.5 * max(held[:on]), "rank 0 holds no more than the others"
