"""What ranks decide together at their start: all take what the fullest GPU has room for, and all end if one refuses."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from learner.model.memory import GIB
from tests.harness import world
from tests.harness.demonstrated import demonstrations, jsonl

pytestmark = pytest.mark.xdist_group("ranks")
ROOMY, TIGHT, FULL = 8 * GIB, 3 * GIB, GIB


@pytest.mark.parametrize("gather", ["auto", "pass"])
def test_ranks_with_unlike_room_take_the_same_microbatches(tmp_path: Path, gather: str) -> None:
    """Whichever rank has the fullest GPU; and if one has too little for a sample, every rank refuses with its line.
    Where rank 0 has it, which holds the copies for the servers, `auto` gathers more often, for larger microbatches."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 8}
    Qwen2Config(vocab_size=32000, num_key_value_heads=2, **shape).save_pretrained(tmp_path)
    memory = [[ROOMY, ROOMY], [ROOMY, TIGHT], [TIGHT, ROOMY], [TIGHT, TIGHT], [ROOMY, FULL], [FULL, TIGHT]]
    world.together("budgets", 2, tmp_path, gather=gather, memory=memory)
    most, *least, one, other = torch.load(tmp_path / "budgets.pt")
    assert all(tokens == other for tokens, other in (most, *least))
    second, first, both = (tokens for tokens, _ in least)
    assert most[0] > first == both >= second > 0 and (first == second) == (gather == "pass")
    for lines in (one, other):
        assert lines[0] == lines[1] and "a GPU has 1.0 GiB; set " in lines[0]
        assert lines[0].startswith("learner.tokens_per_microbatch: auto: a sample of ")


@pytest.mark.parametrize("files", [["rows.jsonl", "gone.jsonl"], ["gone.jsonl", "rows.jsonl"]])
def test_ranks_of_which_one_does_not_see_the_demonstrations_end_together(tmp_path: Path, files: list[str]) -> None:
    jsonl(tmp_path / "rows.jsonl", demonstrations(4))
    world.together("unseen", 2, tmp_path, files=files)
    lines = [(tmp_path / f"unseen-{rank}.txt").read_text() for rank in range(2)]
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"data.train: {tmp_path / 'gone.jsonl'}: no such file")


def test_ranks_of_which_one_does_not_see_the_model_end_together(tmp_path: Path) -> None:
    Qwen2Config(num_hidden_layers=2).save_pretrained(tmp_path / "model")
    world.together("unread", 2, tmp_path, models=["model", "gone"])
    lines = [(tmp_path / f"unread-{rank}.txt").read_text() for rank in range(2)]
    assert lines[0] == lines[1] and lines[0].startswith(f"model.path: {tmp_path / 'gone'}")
