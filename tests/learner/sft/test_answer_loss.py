"""The loss of supervised fine-tuning against transformers' own, of dense models and mixtures of experts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import ModelConfig
from learner.sft.answer_loss import AnswerSteps, HeldOut
from learner.sft.answers import TrainedText
from learner.sft.demonstrations import Demonstrations, SourceRows
from learner.train.optimizer import Optimizer
from learner.train.skipped import MOST_SKIPPED, StepsSkipped
from tests.harness.demonstrated import update
from tests.harness.tiny_experts import tiny_experts
from tests.harness.world import LEARNER, VOCABULARY, plain, policy_of, tiny_model


def made_texts(number: int = 9) -> list[TrainedText]:
    """Random texts of 2 to 30 tokens, of which some are trained."""
    draw = np.random.default_rng(0)
    texts = []
    for _ in range(number):
        tokens = draw.integers(0, VOCABULARY, int(draw.integers(2, 31))).astype(np.int32)
        trained = draw.random(len(tokens)) < 0.5
        trained[[0, -1]] = False, True
        texts.append(TrainedText(tokens, trained))
    return texts


def data_of(texts: list[TrainedText]) -> Demonstrations:
    return Demonstrations([[text] for text in texts], [SourceRows(0, len(texts), None)])


def mean_loss(model: torch.nn.Module, texts: list[TrainedText]) -> torch.Tensor:
    """transformers' loss, one text after another."""
    total, number = torch.zeros(()), sum(int(text.trained.sum()) for text in texts)
    for text in texts:
        ids = torch.tensor(text.tokens, dtype=torch.int64)[None]
        labels = torch.where(torch.tensor(text.trained)[None], ids, -100)
        total = total + model(input_ids=ids, labels=labels).loss * int(text.trained.sum())
    return total / number


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_losses_and_steps_are_those_of_the_model_itself(tmp_path: Path, mesh, kind: str) -> None:
    folder = tmp_path / "model"
    dense = kind == "dense"
    model = tiny_model(folder) if dense else ModelConfig(path=str(tiny_experts(folder)), dtype="float32")
    texts = made_texts()
    policy, theirs = policy_of(model, mesh), plain(model)
    ours = Optimizer(policy, LEARNER, 10)
    steps = AnswerSteps(data_of(texts), ours, 64, len(texts))
    held_out = HeldOut({"own": data_of(texts)}, None, 3, 64)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=LEARNER.lr, betas=LEARNER.betas, weight_decay=0.0)
    (before,) = held_out.measure(policy, 0)
    for version in range(3):
        stats = steps.step(policy, version)
        loss = mean_loss(theirs, texts)
        loss.backward()
        update(theirs, adamw, ours.learning_rate(version))
        assert stats["loss"] == pytest.approx(loss.item(), abs=2e-5)
        assert stats["microbatches"] > 1 and ("moe/router_entropy" in stats) is not dense
        if version == 0:
            assert before.figures["own"]["loss"] == pytest.approx(stats["loss"], abs=1e-6)
    assert held_out.measure(policy, 2) == []
    (after,) = held_out.measure(policy, 3)
    assert after.figures["own"]["loss"] == pytest.approx(mean_loss(theirs, texts).item(), abs=5e-5)
    assert after.figures["own"]["tokens_trained"] == sum(text.trained.sum() for text in texts)


def test_steps_that_change_nothing_end_the_run(tmp_path: Path, mesh) -> None:
    policy, texts = policy_of(tiny_model(tmp_path / "model"), mesh), made_texts(2)
    steps = AnswerSteps(data_of(texts), Optimizer(policy, LEARNER, 10), 64, 2)
    with torch.no_grad():
        next(policy.parameters()).fill_(float("nan"))
    for version in range(MOST_SKIPPED):
        assert steps.step(policy, version)["gradient/skipped"] == 1
    with pytest.raises(StepsSkipped, match=r"the loss is nan; lower learner\.lr"):
        steps.step(policy, MOST_SKIPPED)
