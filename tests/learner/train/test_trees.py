"""A step in which the prefixes of an agent's episodes are computed once, beside a step with every segment apart."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from configs.schema import AlgorithmConfig, CriticConfig, LoraConfig, ModelConfig
from learner.train.batch import Batch, Tree, documents_of, open_part, pack, trees_of
from tests.harness import world
from tests.harness.adapters import stir
from tests.harness.episodic import FORKS, make_forks
from tests.harness.shared_rows import MODELS, SHAPE
from tests.harness.valued import actor_critic, critic_of
from tests.harness.world import LEARNER, algorithm_of, cut, make_groups, policy_of, tiny_model

TOLERANCE = 1e-5
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"algorithm": {"loss": "gspo"}},
    "qwen3": {"learner": {"activation_checkpointing": "block"}, "algorithm": {"entropy_bonus": 0.01}},
    "window": {},
    "softcap": {},
    "sinks": {},
    "experts": {},
    "latent": {},
    "adapter": {"kind": "qwen2", "lora": LoraConfig(rank=4, alpha=8.0)},
}
FAST = ("llama", "window", "experts")


class Found(NamedTuple):
    """What a step leaves."""

    gradients: dict[str, Tensor]
    sums: dict[str, Tensor]
    logprobs: Tensor
    """Values of all trainable tokens, by turn and place."""
    batch: Batch


def saved(folder: Path, name: str) -> Path:
    """Random weights of a model of CASES, with norms and biases that change something."""
    torch.manual_seed(0)
    fields = {"model_type": name} | SHAPE | MODELS.get(name, {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


def step(policy, budget: int, algorithm: AlgorithmConfig, trees: bool) -> Found:
    entries = make_forks()
    part = cut(entries, 3, [len(entries)], 0)
    key_room = policy.sharing.key_room if trees else None
    batch = Batch.from_part(part, budget, policy.costs.quadratic, key_room=key_room)
    made = algorithm_of(policy, budget, algorithm)
    sums = made.backward(policy, batch)
    gradients = world.gradients(policy)
    made.optimizer.adamw.zero_grad()
    scores: dict[tuple[int, int], float] = {}
    for row in batch.microbatches:
        score = policy.score(policy.place(row))[row.scored].tolist()
        keys = zip(row.turn[row.scored].tolist(), row.positions[row.predictor].tolist(), strict=True)
        scores |= dict(zip(keys, score, strict=True))
    return Found(gradients, sums, torch.tensor([scores[key] for key in sorted(scores)]), batch)


def differences(ours: Found, theirs: Found) -> tuple[float, float]:
    """Largest difference of a log-probability, and of a gradient relative to the largest of its tensor."""
    assert ours.gradients.keys() == theirs.gradients.keys() and ours.logprobs.shape == theirs.logprobs.shape
    relative = [
        float((ours.gradients[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in theirs.gradients.items()
        if "k_proj.bias" not in name and gradient.abs().max() > 0  # attention does not depend on it
    ]
    return float((ours.logprobs - theirs.logprobs).abs().max()), max(relative)


@pytest.mark.parametrize("name", [x if x in FAST else pytest.param(x, marks=pytest.mark.long) for x in CASES])
def test_trees_change_nothing(tmp_path: Path, mesh, name: str) -> None:
    """Episodes of 12 turns with three forks, whole and cut into several trees: log-probabilities, gradients and all
    sums are those of the segments apart."""
    case = CASES[name]
    model = ModelConfig(path=str(saved(tmp_path, case.get("kind", name))), dtype="float32", lora=case.get("lora"))
    algorithm = AlgorithmConfig.model_validate(case.get("algorithm", {}))
    learner = LEARNER.model_copy(update=case.get("learner", {}))
    policy = policy_of(model, mesh, learner, entropy_gradient=algorithm.entropy_bonus > 0)
    if case.get("lora"):
        stir(policy)
    apart = step(policy, 400, algorithm, trees=False)
    for budget in (10**6, 120):
        shared = step(policy, budget, algorithm, trees=True)
        assert any(row.targets is not None for row in shared.batch.microbatches)
        assert shared.batch.tokens < 0.6 * apart.batch.tokens and shared.batch.head_rows < apart.batch.head_rows
        assert max(differences(shared, apart)) < TOLERANCE, budget
        for key, value in apart.sums.items():
            if key != "moe":  # counts the tokens of rows
                torch.testing.assert_close(shared.sums[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.xdist_group("ranks")
@pytest.mark.long
def test_ranks_change_nothing(tmp_path: Path, mesh) -> None:
    """Two processes over gloo, also where the cut goes through a group, against one process with segments apart."""
    policy = policy_of(tiny_model(tmp_path / "model"), mesh)
    apart = step(policy, 400, world.ALGORITHM, trees=False)
    configs = [world.ALGORITHM.model_dump(mode="json")]
    arguments = {"cuts": [[3, 3], [2, 4], [6, 0]], "budgets": [10**6, 120], "trees": True, "share": True}
    world.together("gradients", 2, tmp_path, algorithms=configs, **arguments)
    found = torch.load(tmp_path / "gradients.pt")
    assert len(found) == 6
    for gradients in found.values():
        assert differences(apart._replace(gradients=gradients), apart)[1] < TOLERANCE


def test_figures_are_those_of_segments_apart(tmp_path: Path, mesh) -> None:
    """Whole steps: tokens and losses agree, FLOPs are those done, and what is saved makes up the difference."""
    entries = make_forks()
    part, figures = cut(entries, 3, [len(entries)], 0), {}
    for share in (True, False):
        policy = policy_of(tiny_model(tmp_path), mesh, LEARNER.model_copy(update={"share_prompts": share}))
        figures[share] = algorithm_of(policy, 400).step(policy, part)
    trees, apart = figures[True], figures[False]
    for key in ("tokens", "tokens_sampled", "samples", "segments/mean"):
        assert trees.get(key) == apart.get(key), key
    assert trees["loss"] == pytest.approx(apart["loss"], rel=1e-4)
    assert trees["tokens_computed"] < 0.6 * apart["tokens_computed"] == 0.6 * apart["tokens"]
    assert trees["flops"] + trees["flops_saved"] == pytest.approx(apart["flops"]) and apart["flops_saved"] == 0


def test_trees_are_taken_where_they_leave_out_more_than_prompts() -> None:
    """Groups that share their prompts alone keep their rows; an episode's segments become one tree for each group, or
    several of at most the budget."""
    groups, forks = (cut(made, 3, [len(made)], 0) for made in (make_groups(), make_forks()))
    assert not any(isinstance(unit, Tree) for unit in open_part(groups, 10**6, True, None, None, 0.1).units)
    whole = open_part(forks, 10**6, True, None, None, 0.0).units
    assert [(type(unit), len(unit.documents)) for unit in whole] == [(Tree, 3 * len(FORKS))] * 2
    few = open_part(forks, 120, True, None, None, 0.1)
    assert max(few.sizes) <= 120 and len(few.units) > 2
    assert sum(unit.tokens for unit in few.units) > sum(unit.tokens for unit in whole)


def test_a_tree_s_squares_are_the_pairs_that_attention_sees() -> None:
    from buffer.wire.sample import Sample

    entries = make_forks()
    documents, _ = documents_of([Sample.unpack(entry.sample) for entry in entries], range(len(entries)))
    for unit in trees_of(documents, np.array([entry.item for entry in entries]), 10**6, 0.0):
        row = pack([unit])
        pairs = sum(
            n * m - n * (n - 1) // 2
            for n, m in zip(row.cu_seqlens.diff().tolist(), row.shared.starts.diff().tolist(), strict=True)
        )
        assert unit.squares == 2 * pairs - unit.tokens and len(row.tokens) == unit.tokens
        assert unit.copies == len(row.shared.keys) - unit.tokens


def test_what_shares_prompts_alone_says_so(tmp_path: Path, mesh, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(tmp_path)
    assert policy_of(model, mesh).sharing.key_room and not caplog.text
    prompts = policy_of(model, mesh, LEARNER.model_copy(update={"share_prompts": "prompts"}))
    assert prompts.sharing.prompts and prompts.sharing.key_room is None and not caplog.text
    with caplog.at_level(logging.INFO):
        window = ModelConfig(path=str(saved(tmp_path / "window", "window")), dtype="float32")
        sliding = policy_of(window, mesh)
        assert (
            sliding.sharing.key_room
            and not sliding.sharing.prompts
            and sliding.sharing.whole_groups
            and "share_prompts" not in caplog.text
        )
        experts = ModelConfig(path=str(saved(tmp_path / "experts", "experts")), dtype="float32")
        assert policy_of(experts, mesh, replay=True).sharing.key_room is None
        assert "no longer prefixes: routes are replayed (rollout.routing_replay)" in caplog.text
        policy_of(window, mesh, LEARNER.model_copy(update={"share_prompts": "prompts"}))
        assert "learner.share_prompts: off, every sample's prompt is computed: the model has a sliding" in caplog.text


def test_a_critic_s_policy_shares_prompts_alone(tmp_path: Path, mesh, caplog: pytest.LogCaptureFixture) -> None:
    model, entries = tiny_model(tmp_path), make_forks()
    policy, critic = policy_of(model, mesh), critic_of(model, mesh)
    algorithm = actor_critic(policy, critic, 400, AlgorithmConfig(advantage="gae", critic=CriticConfig()))
    with caplog.at_level(logging.INFO):
        batches = [algorithm.pack(policy, cut(entries, 3, [len(entries)], 0)) for _ in range(2)]
    assert all(row.targets is None for batch in batches for row in batch.microbatches)
    assert caplog.text.count("no longer prefixes: a critic judges each token of a row") == 1
