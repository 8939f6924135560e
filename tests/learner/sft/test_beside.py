"""Demonstrations beside the batches of reinforcement learning: gradients, order, accounting, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import DemonstrationsConfig, ModelConfig
from learner.sft.beside import Beside
from tests.harness.tiny_experts import tiny_experts
from tests.harness.world import GATHERS, algorithm_of, cut, make_samples, plain, policy_of, tiny_model, together
from tests.learner.sft.test_answer_loss import data_of, made_texts, mean_loss

WEIGHT = 0.25
PART = cut(make_samples(), 3, [24], 0)


def gradient(policy, algorithm, beside: Beside | None) -> dict[str, torch.Tensor]:
    """The gradient of one batch and of what is drawn beside it."""
    batch = algorithm.pack(policy, PART)
    drawn = beside.draw(policy, batch.version) if beside else None
    algorithm.backward(policy, batch, drawn)
    found = {name: each.grad.full_tensor().clone() for name, each in policy.model.named_parameters()}
    algorithm.optimizer.discard()
    return found


@pytest.mark.parametrize(("kind", "temperature"), [("dense", 1.0), ("experts", 1.0), ("dense", 0.6)])
def test_the_gradient_is_that_of_the_samples_plus_that_of_the_demonstrations(
    tmp_path: Path, mesh, kind: str, temperature: float
) -> None:
    """transformers' own loss of the same texts, one after another, at whatever temperature the policy samples."""
    folder = tmp_path / "model"
    model = tiny_model(folder) if kind == "dense" else ModelConfig(path=str(tiny_experts(folder)), dtype="float32")
    policy, texts = policy_of(model, mesh, temperature=temperature), made_texts()
    algorithm = algorithm_of(policy, 64)
    alone = gradient(policy, algorithm, None)
    both = gradient(policy, algorithm, Beside(data_of(texts), len(texts), WEIGHT, 64))
    theirs = plain(model)
    (WEIGHT * mean_loss(theirs, texts)).backward()
    wanted = dict(theirs.named_parameters())
    for name, each in both.items():
        added = wanted[name].grad if name in wanted and wanted[name].grad is not None else None
        if added is not None:
            torch.testing.assert_close(each - alone[name], added, atol=2e-6, rtol=2e-4)
    assert any(not torch.equal(both[name], alone[name]) for name in both)


@pytest.mark.xdist_group("ranks")
def test_two_ranks_have_the_gradient_of_one(tmp_path: Path, mesh) -> None:
    """However samples fall to the ranks, and whenever gradients are reduced."""
    policy, texts = policy_of(tiny_model(tmp_path / "model"), mesh), made_texts()
    wanted = gradient(policy, algorithm_of(policy, 64), Beside(data_of(texts), len(texts), WEIGHT, 64))
    together("beside", 2, tmp_path, cuts=[[10, 14], [24, 0]], gathers=[*GATHERS])
    found = torch.load(tmp_path / "gradients.pt")
    assert len(found) == 2 * len(GATHERS)
    for each in found.values():
        for name, one in wanted.items():
            torch.testing.assert_close(each[name], one, atol=2e-6, rtol=2e-4)


def test_a_step_counts_demonstrations_apart(tmp_path: Path, mesh) -> None:
    """Their rows and tokens are in no figure of the samples, but their FLOPs and computed tokens count."""
    model, texts = tiny_model(tmp_path / "model"), made_texts()
    found: list[dict[str, Any]] = []
    for beside in (None, Beside(data_of(texts), 4, WEIGHT, 64)):
        policy = policy_of(model, mesh)
        found.append(algorithm_of(policy, 64, beside=beside).step(policy, PART))
    alone, both = found
    drawn = data_of(texts).drawn(4 * PART.version, 4)
    assert both["demonstrations/rows"] == 4 and both["demonstrations/loss"] > 0
    assert both["demonstrations/epoch"] == pytest.approx(4 * (PART.version + 1) / len(texts))
    assert both["demonstrations/tokens_trained"] == sum(int(text.trained.sum()) for text in drawn)
    for name in ("tokens", "tokens_sampled", "samples", "loss", "reward/mean", "microbatches"):
        assert both[name] == pytest.approx(alone[name])
    assert both["tokens_computed"] - alone["tokens_computed"] == sum(len(text.tokens) for text in drawn)
    assert both["flops"] > alone["flops"] and not any(name.startswith("demonstrations") for name in alone)


def test_a_version_draws_the_same_rows_whatever_happened_before() -> None:
    texts = made_texts()
    first, again = (Beside(data_of(texts), 4, WEIGHT, 64) for _ in range(2))
    rows = [[text.tokens.tolist() for text in first.data.drawn(version * 4, 4)] for version in range(6)]
    assert rows[4] == [text.tokens.tolist() for text in again.data.drawn(16, 4)]
    assert {tuple(text) for row in rows for text in row} == {tuple(text.tokens.tolist()) for text in texts}
    assert first.position(5) == again.position(5) and first.position(5).rows == 20 and first.position(5).beside


@pytest.mark.parametrize(("share", "samples", "rows"), [(0.1, 256, 28), (0.5, 256, 256), (0.001, 16, 1), (0.9, 10, 90)])
def test_a_share_of_a_batch_is_rows(share: float, samples: int, rows: int) -> None:
    assert DemonstrationsConfig(path=Path("x"), share=share).rows(samples) == rows
