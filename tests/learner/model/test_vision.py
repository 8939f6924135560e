"""A policy that sees, against transformers' own forward pass sample by sample: packed, sharing prompts, by ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from buffer.data.images import ImageFormat, SeenImage, decode
from buffer.wire.sample import Sample
from configs.model_facts import TOWER
from configs.schema import ModelConfig
from learner.model import attention, loading, towers, vision
from learner.model.flops import TowerCosts
from learner.model.microbatch import one_document
from learner.train.batch import Batch
from learner.train.pictures import shown_row
from tests.harness import world
from tests.harness.covered import covered
from tests.harness.pictured import SIZES, form_of, make_pictured, own_logprobs, own_model, seeing_model
from tests.harness.tiny_vlm import KINDS, encoded, picture
from tests.harness.world import LEARNER, algorithm_of, policy_of

IMAGE, GRIDS = 5, st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=4)


MUTUAL = ("gemma3",)
"""Kinds in which the tokens of an image see each other."""


@pytest.fixture(scope="module", params=KINDS)
def seeing(request, tmp_path_factory) -> ModelConfig:
    """A model of each architecture, whose head is not tied."""
    return seeing_model(tmp_path_factory.mktemp(request.param), request.param, tied=False)


@pytest.mark.parametrize("seeing", [kind for kind in KINDS if kind not in MUTUAL], indirect=True, scope="module")
@given(grids=GRIDS, texts=st.lists(st.integers(0, 5), min_size=5, max_size=5))
@settings(max_examples=60, deadline=None)
def test_rotary_positions_are_transformers_own(rope_of, grids: list[tuple[int, int]], texts: list[int]) -> None:
    types, images = [0] * texts[0], []
    for (height, width), text in zip(grids, texts[1:], strict=False):
        images.append((len(types), (1, 2 * height, 2 * width)))
        types += [1] * (height * width) + [0] * (text + 1)
    types += [0]
    assert vision.rope_positions(len(types), images, 2).tolist() == rope_of(types, images)


@pytest.fixture(scope="module")
def rope_of(seeing):
    """transformers' `get_rope_index` as a function of token types and images."""
    core = own_model(seeing, form_of(seeing)).model

    def of(types: list[int], images) -> list[list[int]]:
        grid = torch.tensor([grid for _, grid in images]) if images else None
        kinds = torch.tensor([types])
        found, _ = core.get_rope_index(torch.where(kinds == 1, IMAGE, 9), kinds.int(), image_grid_thw=grid)
        return found[:, 0].tolist()

    return of


@pytest.mark.parametrize(
    ("seeing", "budget", "share"), covered(KINDS, [60, 10**6], [False, True]), indirect=["seeing"], scope="module"
)
def test_packed_rows_are_transformers_own(seeing: ModelConfig, mesh, budget: int, share: bool) -> None:
    """Odd sizes, several images, an image in a later turn, text mixed in, sampled placeholders."""
    form, policy = form_of(seeing), policy_of(seeing, mesh)
    batch, own = make_pictured(form), own_model(seeing, form)
    share = share and policy.sharing.prompts  # not with layers that keep a state
    packed = Batch.from_part(batch.part(3, [15], 0), budget, share_prompts=share, form=form)
    assert any(row.shared for row in packed.microbatches) is share
    seen = 0
    for row in packed.microbatches:
        got = policy.score(policy.place(row))
        for sample in row.sequence.unique().tolist():
            ours = (row.sequence == sample) & row.sampled
            want = own_logprobs(own, batch, sample, form)
            chosen = torch.from_numpy(Sample.unpack(batch.entries[sample].sample).sampled.numpy() == 1)
            torch.testing.assert_close(got[ours], want[chosen], rtol=0, atol=1e-5)
            seen += int(ours.sum())
    assert seen == packed.rows.sampled.numpy().sum()


def test_another_picture_is_another_answer(seeing: ModelConfig, mesh) -> None:
    """Or the tests above would pass without images."""
    form, policy = form_of(seeing), policy_of(seeing, mesh)
    found = [policy.logprobs_of(shown(form, seed)) for seed in (0, 1)]
    assert np.abs(np.array(found[0]) - np.array(found[1]))[-3:].mean() > 0.01


def shown(form: ImageFormat, seed: int = 0):
    """A document of an image of 2 x 2 tokens and some text."""
    side = 2 * form.factor
    tokens = [1, form.vision_start, *[form.image_token] * 4, form.vision_end, 9, 10, 11, 12]
    return shown_row([(tokens, [SeenImage(2, decode(encoded(picture(side, side, seed)), form))])])


def test_the_tower_gets_the_processor_s_values(seeing: ModelConfig, mesh) -> None:
    form = form_of(seeing)
    seen = decode(encoded(picture(*SIZES[1])), form)
    row = shown_row([([9, *[form.image_token] * seen.num_tokens], [SeenImage(1, seen)])])
    got = towers._normalised(row.images, form.temporal)
    torch.testing.assert_close(got, torch.from_numpy(seen.patches()), rtol=0, atol=1e-6)


def test_a_picture_is_encoded_once_for_all_its_samples(seeing: ModelConfig, mesh) -> None:
    form = form_of(seeing)
    packed = Batch.from_part(make_pictured(form).part(3, [15], 0), 10**6, form=form)
    (row,) = packed.microbatches
    assert len(row.images.grid) == 4 + 3  # those of the rows, and one of each sample with a second turn
    assert len(row.images.take) > len(row.images.take.unique()) == row.images.grid.prod(-1).sum() // 4


def test_every_parameter_gets_a_gradient_without_images(seeing: ModelConfig, mesh) -> None:
    """Or the collectives of the other ranks would wait for it."""
    policy = policy_of(seeing, mesh)
    policy(policy.place(one_document([7, 8, 9])))[0].sum().backward()
    found = world.gradients(policy)
    assert len(found) == len(list(policy.parameters()))
    assert all((found[name].any() > 0) == (not TOWER.search(f".{name}")) for name in found if "k_proj.bias" not in name)


def gradients(policy, batch, form: ImageFormat, budget: int, share: bool = True) -> dict[str, torch.Tensor]:
    algorithm, share = algorithm_of(policy, budget, form=form), share and policy.sharing.prompts
    packed = Batch.from_part(
        batch.part(3, [15], 0), budget, policy.costs.quadratic, share, form, policy.costs.patch_cost
    )
    algorithm.backward(policy, packed)
    found = world.gradients(policy)
    algorithm.optimizer.adamw.zero_grad()
    return found


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() <= 2e-5 * theirs[name].norm() + 1e-8, name


@pytest.mark.parametrize(
    ("seeing", "saving"),
    covered(KINDS, ["none", "selective", "block"], strength=1),
    indirect=["seeing"],
    scope="module",
)
def test_packing_and_sharing_change_no_gradient(seeing: ModelConfig, mesh, saving: str) -> None:
    form = form_of(seeing)
    policy = policy_of(seeing, mesh, LEARNER.model_copy(update={"activation_checkpointing": saving}))
    batch = make_pictured(form)
    want = gradients(policy, batch, form, 10**6, share=False)
    assert all(gradient.any() for name, gradient in want.items() if "k_proj.bias" not in name)
    for budget, share in ((60, False), (60, True), (10**6, True)):
        close(gradients(policy, batch, form, budget, share), want)


def test_what_is_recomputed_is_what_it_was(seeing: ModelConfig, mesh) -> None:
    """In bfloat16, where the tower's rotary embeddings are float32 outside of its blocks."""
    model, form, found = seeing.model_copy(update={"dtype": "bfloat16"}), form_of(seeing), []
    for saving in ("none", "block"):
        policy = policy_of(model, mesh, LEARNER.model_copy(update={"activation_checkpointing": saving}))
        found.append(gradients(policy, make_pictured(form), form, 80))
    kept, again = found
    assert [name for name, gradient in kept.items() if not torch.equal(gradient, again[name])] == []


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("seeing", "freeze"),
    [
        pytest.param(
            kind, parts, id=f"{kind}-{parts}", marks=() if (kind, parts) == ("qwen2_5_vl", []) else pytest.mark.long
        )
        for kind in KINDS
        for parts in ([], ["vision", "projector"])
    ],
    indirect=["seeing"],
    scope="module",
)
def test_ranks_change_no_gradient(seeing: ModelConfig, mesh, tmp_path: Path, freeze: list[str]) -> None:
    """Two processes over gloo against this one: a rank without any sample, with [12, 3] one without images."""
    model, form, cuts = seeing.model_copy(update={"freeze": freeze}), form_of(seeing), [[15, 0], [6, 9], [12, 3]]
    want = gradients(policy_of(model, mesh), make_pictured(form), form, 80)
    world.together("pictured", 2, tmp_path, model=model.model_dump(), cuts=cuts, budget=80)
    found = torch.load(tmp_path / "gradients.pt")
    assert len(found) == len(cuts)
    for got in found:
        close(got, want)


TOWER_PARTS = {*("patch_embed", "blocks", "pos_embed"), *("embeddings", "encoder", "post_layernorm")}
PROJECTORS = {*("merger", "deepstack_merger_list"), *("mm_input_projection_weight", "mm_soft_emb_norm")}
FROZEN = {
    "nothing": ([], set()),
    "vision": (["vision"], TOWER_PARTS),
    "projector": (["projector"], PROJECTORS),
    "both": (["vision", "projector"], TOWER_PARTS | PROJECTORS),
}


@pytest.mark.parametrize(("seeing", "case"), covered(KINDS, [*FROZEN], strength=1), indirect=["seeing"], scope="module")
def test_freezing(seeing: ModelConfig, mesh, case: str) -> None:
    """What is frozen has no gradient and no optimizer state and stays as it is; the rest moves."""
    form, (parts, modules) = form_of(seeing), FROZEN[case]
    policy = policy_of(seeing.model_copy(update={"freeze": parts}), mesh)
    step, before = algorithm_of(policy, 80, form=form), world.weights(policy)
    figures = step.step(policy, make_pictured(form).part(3, [15], 0))
    assert figures["gradient/norm"] > 0 and figures["images"] >= 7
    frozen = {name for name in before if TOWER.search(f".{name}") and modules & {*name.split(".")}}
    assert policy.frozen_names() == frozen
    assert len(step.optimizer.adamw.state) == len(before) - len(frozen)
    after = world.weights(policy)
    for name, tensor in before.items():
        if "k_proj.bias" not in name:  # its gradient is 0 but for rounding
            assert torch.equal(after[name], tensor) == (name in frozen), name


def test_a_frozen_tower_gives_the_same_scores(seeing: ModelConfig, mesh) -> None:
    free, form = policy_of(seeing, mesh), form_of(seeing)
    for options in ({"freeze": ["vision", "projector"]}, {"freeze": ["vision"]}):
        other = policy_of(seeing.model_copy(update=options), mesh)
        assert other.logprobs_of(shown(form)) == free.logprobs_of(shown(form))
    reference = policy_of(seeing, mesh, frozen=True)
    assert reference.logprobs_of(shown(form)) == free.logprobs_of(shown(form))


def test_random_weights_see(seeing: ModelConfig, mesh) -> None:
    """Benchmarks of shapes start so: every buffer must be there, and every norm let something through."""
    policy, form = policy_of(seeing, mesh, random=True), form_of(seeing)
    one, other = (torch.tensor(policy.logprobs_of(shown(form, seed))) for seed in (1, 2))
    assert one.isfinite().all() and (one - other).abs().mean() > 0.01


def test_weights_are_sharded_by_block(seeing: ModelConfig, mesh) -> None:
    policy = policy_of(seeing, mesh)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
    names = {name for name, _, _ in policy.weight_specs()}
    assert {TOWER.search(f".{name}") is not None for name in names} == {True, False}


@pytest.mark.parametrize("name", ["sdpa", "varlen", "flash4"])
def test_the_tower_s_attention_is_asked_for_all_images_at_once(name: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert "flash" in attention.of_tower(name) and attention.of_tower(name) in ALL_ATTENTION_FUNCTIONS


@pytest.mark.long
@pytest.mark.parametrize("seeing", KINDS, indirect=True, scope="module")
def test_a_block_of_the_tower_compiles_in_one_piece(seeing: ModelConfig) -> None:
    """With a GPU's attention, on the meta device: forward and backward, whatever the number of patches."""
    torch._dynamo.reset()
    model = loading.build_on_meta(seeing, attention.registered("varlen"))
    sight, parts = vision.Sight(model, attention.of_tower("varlen")), towers.tower_parts(model.to(torch.bfloat16))
    block, width = parts.blocks[0], model.config.vision_config.hidden_size
    whole = model.config.model_type not in MUTUAL  # its layers do not hand on the bounds of images
    block.forward = torch.compile(block.forward, dynamic=True, fullgraph=whole, backend="aot_eager")
    for patches in (64, 96, 128):
        hidden = torch.zeros(patches, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
        starts = torch.zeros(3, dtype=torch.int32, device="meta")
        sight.tower.compute_block(block, hidden, starts).sum().backward()
        assert hidden.grad is not None and hidden.grad.shape == hidden.shape


def test_text_models_have_no_tower(tmp_path: Path, mesh) -> None:
    policy = policy_of(world.tiny_model(tmp_path), mesh)
    assert policy.sight is None and policy.costs.tower is None and policy.frozen_names() == frozenset()
    assert policy.place(one_document([1, 2, 3])).images is None
    assert TowerCosts.of(policy.model) is None
