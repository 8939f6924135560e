"""The made-up samples of `learner/rehearsal.py` fill microbatches, and computing them changes no later step."""

from pathlib import Path

import pytest
import torch

from configs.schema import Config
from learner.rehearsal import MICROBATCHES, made_up, own_part
from learner.sound import SoundSteps
from learner.train.batch import Batch
from tests.harness import world
from tests.harness.world import algorithm_of, cut, make_samples, policy_of, tiny_model


def run_file(prompt: int, answer: int) -> Config:
    return Config.model_validate({
        "model": {"path": "none"}, "data": {"train": "none", "max_prompt_tokens": prompt},
        "reward": {"function": "none"}, "sampling": {"max_tokens": answer},
    })  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(("prompt", "answer", "budget"), [(16, 48, 512), (1, 30, 31), (40, 8, 400), (64, 64, 100)])
def test_made_up_samples_fill_the_microbatches_of_each_rank(
    prompt: int, answer: int, budget: int, number: int, shared: bool, mesh: object
) -> None:
    for rank in range(number):
        part = made_up(run_file(prompt, answer), budget, 64, rank, number, shared)
        assert (part.rank, part.world) == (rank, number) and part.samples
        if number == 1:  # ranks agree on their number of microbatches
            batch = Batch.from_part(part, budget, share_prompts=shared)
            tokens = [len(row.tokens) for row in batch.microbatches]
            assert len(tokens) == MICROBATCHES and max(tokens) <= max(budget, prompt + answer)
            assert min(tokens) > budget - (prompt + answer)


def test_a_step_after_the_made_up_samples_is_the_same_as_without_them(tmp_path: Path, mesh: object) -> None:
    entries, found = make_samples(), []
    for tried in (False, True):
        policy = policy_of(tiny_model(tmp_path), mesh)
        steps = algorithm_of(policy, 64)
        if tried:
            trial = made_up(run_file(8, 22), 64, 64, 0, 1, policy.sharing.prompts)
            sound = SoundSteps(steps, None, None, trial)  # type: ignore[arg-type]
            sound.warm_up(policy)
            assert sound.made_up is None and all(p.grad is None for p in policy.parameters())
            sound.warm_up(policy)  # has nothing left to do
        steps.step(policy, cut(entries, 3, [len(entries)], 0))
        found.append(world.weights(policy))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_nothing_is_tried_on_a_cpu(tmp_path: Path, mesh: object) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    assert own_part(run_file(8, 22), policy, 64, 64, 0, 1) is None
