"""A step in which each prompt is computed once is the step in which every sample has its own: gradients, sums,
log-probabilities. Beside each comparison stands its control, the same step without sharing in other microbatches."""

from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from buffer.wire.sample import Sample
from configs.schema import AlgorithmConfig
from learner.model.microbatch import CopiedPrompts, SharedPrompts
from learner.train.batch import LEAST_SAVED, Batch, alone, documents_of, pack, shared_units
from tests.harness import world
from tests.harness.covered import covered
from tests.harness.world import (
    LEARNER,
    algorithm_of,
    cut,
    make_groups,
    make_sample,
    make_samples,
    policy_of,
    tiny_model,
)
from tests.learner.model.test_shared_prompts import FORMS, scored, visible

TOLERANCE = 2e-5
LOSSES = [
    {"loss": "dppo"},
    {"loss": "gspo"},
    {"loss": "ppo", "entropy_bonus": 0.01},
    {"loss": "topr", "aggregation": "prompt"},
    {"loss": "m2po", "aggregation": "sequence"},
]


ITEMS = np.array([entry.item for entry in make_groups()])


class Found(NamedTuple):
    """What a step leaves."""

    gradients: dict[str, Tensor]
    sums: dict[str, Tensor]
    logprobs: Tensor
    """Values of all trainable tokens, by sample and position."""
    batch: Batch


def step(policy, budget: int, algorithm: AlgorithmConfig, share: bool) -> Found:
    entries = make_groups()
    part = cut(entries, 3, [len(entries)], 0)
    batch = Batch.from_part(part, budget, policy.costs.quadratic, share)
    made = algorithm_of(policy, budget, algorithm)
    sums = made.backward(policy, batch)
    gradients = world.gradients(policy)
    made.optimizer.adamw.zero_grad()
    scores = {}
    for row in batch.microbatches:
        score = policy.score(policy.place(row))[row.scored].tolist()
        keys = zip(row.sequence[row.scored].tolist(), row.positions[row.scored].tolist(), strict=True)
        scores |= dict(zip(keys, score, strict=True))
    return Found(gradients, sums, torch.tensor([scores[key] for key in sorted(scores)]), batch)


def differences(ours: Found, theirs: Found) -> tuple[float, float]:
    """Largest difference of a log-probability, and of a gradient relative to the largest of its tensor."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    assert ours.logprobs.shape == theirs.logprobs.shape
    relative = [
        float((ours.gradients[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in theirs.gradients.items()
        if "k_proj.bias" not in name  # attention does not depend on it
    ]
    return float((ours.logprobs - theirs.logprobs).abs().max()), max(relative)


@pytest.mark.parametrize(
    ("saving", "options"),
    covered(
        ["none", "selective", "block"], LOSSES, strength=1, ids=lambda it: it if isinstance(it, str) else it["loss"]
    ),
)
def test_sharing_changes_nothing(tmp_path: Path, mesh, saving: str, options: dict) -> None:
    algorithm = AlgorithmConfig(**options)
    learner = LEARNER.model_copy(update={"activation_checkpointing": saving})
    model, bonus = tiny_model(tmp_path, tied=saving == "block"), algorithm.entropy_bonus > 0
    policy = policy_of(model, mesh, learner, entropy_gradient=bonus)
    alone, control = (step(policy, budget, algorithm, share=False) for budget in (160, 90))
    assert max(differences(control, alone)) < TOLERANCE
    kinds = {"joined": SharedPrompts, "copied": CopiedPrompts}
    for budget, form in product((10**6, 160, 50), FORMS):  # all groups whole, some, none
        policy.sharing.most_copied = FORMS[form]
        shared = step(policy, budget, algorithm, share=True)
        assert kinds[form] in {type(policy.place(row).shared) for row in shared.batch.microbatches}
        assert shared.batch.tokens < alone.batch.tokens
        assert max(differences(shared, alone)) < TOLERANCE, (budget, form)
        for name, value in alone.sums.items():
            torch.testing.assert_close(shared.sums[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.xdist_group("ranks")
def test_ranks_change_nothing(tmp_path: Path, mesh) -> None:
    """Two processes over gloo, also where the cut goes through a group, against one process without sharing."""
    policy = policy_of(tiny_model(tmp_path / "model", tied=True), mesh)
    alone, control = (step(policy, budget, world.ALGORITHM, share=False) for budget in (160, 90))
    configs = [world.ALGORITHM.model_dump(mode="json")]
    arguments = {"cuts": [[9, 19], [28, 0]], "budgets": [60, 160], "share": True}
    world.together("gradients", 2, tmp_path, algorithms=configs, **arguments)
    found = torch.load(tmp_path / "gradients.pt")
    assert len(found) == 4
    for gradients in (control.gradients, *found.values()):
        assert max(differences(alone._replace(gradients=gradients), alone)) < TOLERANCE


def test_nothing_shared_is_one_row_of_whole_documents(tmp_path: Path, mesh) -> None:
    """Samples without a common prompt are packed exactly as without the option."""
    entries = make_samples()
    part = cut(entries, 3, [len(entries)], 0)
    ours, theirs = (Batch.from_part(part, 64, 0.1, share) for share in (True, False))
    for one, other in zip(ours.microbatches, theirs.microbatches, strict=True):
        assert one.shared is None and all(
            torch.equal(value, getattr(other, name)) if isinstance(value, Tensor) else value == getattr(other, name)
            for name, value in vars(one).items()
        )


def test_flops_are_those_done_and_tokens_those_of_samples(tmp_path: Path, mesh) -> None:
    entries = make_groups()
    part = cut(entries, 3, [len(entries)], 0)
    figures = {}
    for share in (True, False):
        learner = LEARNER.model_copy(update={"share_prompts": share})
        policy = policy_of(tiny_model(tmp_path), mesh, learner)
        figures[share] = algorithm_of(policy, 160).step(policy, part)
    tokens = part.rows.tokens.numpy()
    assert figures[True]["tokens"] == figures[False]["tokens"] == figures[False]["tokens_computed"] == tokens.sum()
    assert figures[True]["tokens_computed"] < tokens.sum()
    costs, trainable = policy.costs, part.rows.sampled.numpy().sum()
    assert figures[False]["flops"] == pytest.approx(costs.total(tokens.sum(), trainable, (tokens**2).sum()))
    saved = costs.per_token * (tokens.sum() - figures[True]["tokens_computed"])
    assert figures[True]["flops"] < figures[False]["flops"] - saved
    assert figures[True]["loss"] == pytest.approx(figures[False]["loss"], rel=1e-4)


SAMPLES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 9, 30]), st.integers(1, 20)), min_size=1, max_size=25
)
"""Item, which also chooses the prompt's tokens, length of the prompt, length of the answer."""
TOKENWISE = ("behaviour", "versions", "sequence")


@given(chosen=SAMPLES, budget=st.integers(1, 120))
def test_units(chosen: list[tuple[int, int, int]], budget: int) -> None:
    """No sample is lost, only samples of one item with one prompt are together, and only where they fit and save."""
    draw = np.random.default_rng(0)
    texts = draw.integers(0, 64, (4, 30))
    samples = [make_sample(draw, p, n, 3, 0.0, texts[item][:p]) for item, p, n in chosen]
    documents, _ = documents_of(samples, range(len(samples)))
    units = shared_units(documents, np.array([item for item, *_ in chosen]), budget)
    assert sorted(document.row for unit in units for document in unit.documents) == list(range(len(samples)))
    for unit in units:
        rows = [document.row for document in unit.documents]
        lengths = [samples[row].tokens.shape[0] for row in rows]
        if len(rows) > 1:
            assert {chosen[row][:2] for row in rows} == {(chosen[rows[0]][0], unit.prompt)}
            assert unit.tokens <= budget and sum(lengths) - unit.tokens >= LEAST_SAVED * sum(lengths)
        row = pack([unit])
        assert len(row.tokens) == unit.tokens
        assert unit.squares == 2 * int(visible(row).sum()) - unit.tokens
    shared, whole = pack(units), pack(alone([document for unit in units for document in unit.documents]))
    assert scored(shared) == scored(whole)
    kept = [sorted(getattr(row, name)[row.scored].tolist()) for row in (shared, whole) for name in TOKENWISE]
    assert kept[: len(TOKENWISE)] == kept[len(TOKENWISE) :]


def test_a_prompt_stands_once() -> None:
    """Groups of 5, 1, 7, 3, 4 with two prompts, 2 and 6."""
    entries = make_groups()
    documents, _ = documents_of([Sample.unpack(entry.sample) for entry in entries], range(len(entries)))
    sizes = [len(unit.documents) for unit in shared_units(documents, ITEMS, 10**6)]
    assert sorted(sizes) == sorted([5, 1, 7, 3, 2, 2, 2, 6])
    # two samples of a group of 64 tokens that would save 2 of them
    draw = np.random.default_rng(0)
    pair, _ = documents_of([make_sample(draw, 2, 31, 3, 0.0, np.array([1, 2])) for _ in range(2)], range(2))
    assert LEAST_SAVED <= 2 / 66 and len(shared_units(pair, np.zeros(2), 100)) == 1
    pair, _ = documents_of([make_sample(draw, 1, 31, 3, 0.0, np.array([1])) for _ in range(2)], range(2))
    assert LEAST_SAVED > 1 / 64 and len(shared_units(pair, np.zeros(2), 100)) == 2
