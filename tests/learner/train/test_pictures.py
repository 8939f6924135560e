"""Images of a part: decoded and compared with what the server saw, packed by tokens and patches, trained and saved."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText

from buffer.data.images import SeenImage, decode
from buffer.wire.message import Array
from buffer.wire.protocol import Part
from buffer.wire.sample import Sample, sample_stats
from configs.schema import AlgorithmConfig, ModelConfig
from learner.checkpoint import Checkpoints
from learner.model.vision import PATCHES_PER_TOKEN
from learner.saved import export
from learner.train import collectives
from learner.train.batch import Batch, documents_of, first_fit, shared_units
from learner.train.pictures import PictureMismatch, Placed, _blocks, num_patches, open_images
from tests.harness import world
from tests.harness.covered import covered
from tests.harness.pictured import Brought, form_of, make_pictured, own_logprobs, seeing_model
from tests.harness.tiny_vlm import encoded, picture
from tests.harness.world import LEARNER, algorithm_of, policy_of


@pytest.fixture(scope="module", params=["qwen2_5_vl"])
def seeing(request, tmp_path_factory) -> ModelConfig:
    return seeing_model(tmp_path_factory.mktemp(request.param), request.param, tied=False)


def opened(part: Part, form):
    return open_images(part, [Sample.unpack(data) for data in part.samples], form)


def test_images_are_those_of_the_row_and_of_the_sample(seeing: ModelConfig) -> None:
    form = form_of(seeing)
    batch = make_pictured(form)
    seen, problem = opened(batch.part(3, [15], 0), form)
    assert problem == "" and sorted(seen) == [0, 1, 2, 3, 4, 5, 9, 10, 11]
    assert [len(seen[row]) for row in sorted(seen)] == [1, 1, 1, 3, 3, 3, 2, 2, 2]
    for row, images in seen.items():
        sample = Sample.unpack(batch.entries[row].sample)
        tokens = sample.tokens.numpy()
        for image, told in zip(images, sample.images, strict=True):
            assert image.picture.digest == told.digest
            assert (tokens[image.start : image.start + image.picture.num_tokens] == form.image_token).all()
    assert len({id(image.picture) for row in (0, 1, 2) for image in seen[row]}) == 1  # decoded once


def other(data: bytes) -> list[bytes]:
    return [encoded(picture(56, 56, seed=99))]


def half(data: bytes) -> list[bytes]:
    return [data[: len(data) // 2]]


def gone(data: bytes) -> list[bytes]:
    return []


DAMAGE = {
    other: "image 0 of its row in data.train: its pixels have the digest [0-9a-f]{12} here and [0-9a-f]{12} on the ser",
    half: "image 0 of its row in data.train: a PNG file that cannot be decoded",
    gone: "its row in data.train has 0 images, and a sample shows more",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_another_image_than_the_policy_saw_is_never_trained(seeing: ModelConfig, mesh, damage) -> None:
    """One line that names item, image and remedy."""
    form = form_of(seeing)
    batch = make_pictured(form)
    batch = batch._replace(files=batch.files | {0: damage(batch.files[0][0])})
    with pytest.raises(PictureMismatch, match=f"^item 0: {DAMAGE[damage]}.*; .*restore the data file") as raised:
        Batch.from_part(batch.part(3, [15], 0), 100, form=form)
    assert "\n" not in str(raised.value)


def test_all_ranks_end_where_one_has_another_image(seeing: ModelConfig, mesh, monkeypatch) -> None:
    form, real = form_of(seeing), collectives.all_reduce_max
    monkeypatch.setattr(collectives, "all_reduce_max", lambda *mine: [*real(*mine[:-1]), 1.0])
    with pytest.raises(PictureMismatch, match="another rank has an image that is not what the policy saw"):
        Batch.from_part(make_pictured(form).part(3, [15], 0), 100, form=form)


def test_prompts_with_other_images_are_not_shared(seeing: ModelConfig) -> None:
    """Samples of one item whose tokens are equal, but whose task shows each another picture of one size."""
    form = form_of(seeing)
    sample = Sample.unpack(make_pictured(form).entries[0].sample)
    start, side = sample.images[0].start, 2 * form.factor
    shown = [decode(encoded(picture(side, side, seed)), form) for seed in (0, 1)]
    for pictures, expected in (((0, 0, 0, 0), [4]), ((0, 1, 0, 1), [2, 2])):
        seen = {row: [SeenImage(start, shown[number])] for row, number in enumerate(pictures)}
        documents, _ = documents_of([sample] * 4, range(4), seen)
        units = shared_units(documents, np.zeros(4), 10**6)
        assert [len(unit.documents) for unit in units] == expected


@given(sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 200)), max_size=30), budget=st.integers(1, 60))
def test_no_bin_is_over_either_budget(sizes: list[tuple[int, int]], budget: int) -> None:
    whole = [max(tokens, -(-patches // PATCHES_PER_TOKEN)) for tokens, patches in sizes]
    for chosen in first_fit(whole, budget):
        tokens, patches = (sum(sizes[i][k] for i in chosen) for k in (0, 1))
        assert len(chosen) == 1 or (tokens <= budget and patches <= PATCHES_PER_TOKEN * budget)


def test_rows_are_filled_by_patches_too(seeing: ModelConfig, mesh) -> None:
    form = form_of(seeing)
    part = make_pictured(form).part(3, [15], 0)
    for budget in (40, 80):
        rows = Batch.from_part(part, budget, share_prompts=True, form=form).microbatches
        for row in rows:
            samples = len(row.sequence.unique())
            patches = 0 if row.images is None else int(row.images.grid.prod(-1).sum())
            assert samples <= 3 or (len(row.tokens) <= budget and patches <= PATCHES_PER_TOKEN * budget)


def test_samples_that_share_a_prompt_are_parted_by_patches_too(seeing: ModelConfig) -> None:
    """Each has an image of its own in a later turn: patches run out before tokens do."""
    form, sizes = form_of(seeing), set[int]()
    part = make_pictured(form).part(3, [15], 0)
    samples, rows = [Sample.unpack(data) for data in part.samples[9:12]], range(9, 12)
    first, _ = opened(part, form)
    large = {row: decode(encoded(picture(112, 112, row)), form) for row in rows}
    seen = {row: [first[row][0], SeenImage(first[row][1].start, large[row])] for row in large}
    documents, _ = documents_of(samples, rows, seen)
    for budget in range(20, 160, 5):
        for unit in shared_units(documents, part.rows.item.numpy(), budget):
            sizes.add(number := len(unit.documents))
            patches = num_patches(image for document in unit.documents for image in document.images)
            assert number == 1 or (unit.tokens <= budget and patches <= PATCHES_PER_TOKEN * budget)
    assert sizes == {1, 2, 3}


def test_a_block_of_an_image_sees_its_document_up_to_its_own_end() -> None:
    placed = [Placed(3, SimpleNamespace(num_tokens=2), 1), Placed(7, SimpleNamespace(num_tokens=3), 6)]
    blocks = [part.tolist() if isinstance(part, torch.Tensor) else part for part in _blocks(placed)]
    assert blocks[:3] == [[3, 4, 7, 8, 9], [0, 2, 5], 3]
    assert blocks[3:] == [[1, 2, 3, 4, 6, 7, 8, 9], [0, 4, 8], 4]


def test_patches_count_once_for_a_picture() -> None:
    class Square:
        digest, grid = "a", (1, 4, 6)

    assert num_patches([SeenImage(0, Square), SeenImage(9, Square)]) == 24
    assert num_patches([]) == 0


def test_metrics_count_images(seeing: ModelConfig, mesh) -> None:
    form, policy = form_of(seeing), policy_of(seeing, mesh)
    part = make_pictured(form).part(3, [15], 0)
    figures = algorithm_of(policy, 10**6, form=form).step(policy, part)
    (row,) = Batch.from_part(part, 10**6, share_prompts=True, form=form).microbatches
    patches = row.images.grid.prod(-1).tolist()
    assert (figures["images"], figures["patches"]) == (len(patches), sum(patches))
    text = policy.costs.total(figures["tokens_computed"], figures["tokens_sampled"], 0)
    assert figures["flops"] > text + 0.99 * policy.costs.tower.total(patches)


@pytest.mark.parametrize("loss", ["dppo", "m2po"])
def test_pixels_of_few_microbatches_are_on_the_device(
    seeing: ModelConfig, mesh, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Pixels of a whole batch may take more memory than the estimate has. Three microbatches may be there at a time:
    the one that is computed, the one before it, and a blank one.
    """
    form, policy = form_of(seeing), policy_of(seeing, mesh)
    algorithm = algorithm_of(policy, 30, AlgorithmConfig(loss=loss), form=form)
    batch, brought = algorithm.pack(policy, make_pictured(form).part(3, [15], 0)), Brought(monkeypatch)
    showing = sum(row.images is not None for row in batch.microbatches)
    algorithm.backward(policy, batch)
    assert brought.all >= showing > 4 and brought.most <= 3
    assert brought.all - showing in ((0, 1) if loss == "dppo" else (showing, showing + 1)), "once a pass, and a blank"


def test_text_models_have_no_metrics_of_images(tmp_path: Path, mesh) -> None:
    policy = policy_of(world.tiny_model(tmp_path), mesh)
    figures = algorithm_of(policy, 64).step(policy, world.cut(world.make_samples(), 3, [24], 0))
    assert not {"images", "patches"} & figures.keys()


LONG = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize(
    "parts",
    [pytest.param([], marks=LONG), ["vision"], pytest.param(["vision", "projector"], marks=LONG)],
    ids=str,
)
def test_resumed_is_uninterrupted(seeing: ModelConfig, mesh, tmp_path: Path, parts: list[str]) -> None:
    """Bit for bit, with frozen parts too, which have no optimizer state."""
    model = seeing.model_copy(update={"freeze": parts})
    whole = trained(tmp_path / "a", model, mesh, 0, 4)
    trained(tmp_path / "b", model, mesh, 0, 3)  # its version 3 is lost: 2 was the checkpoint
    again = trained(tmp_path / "b", model, mesh, 2, 4)
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def trained(folder: Path, model: ModelConfig, mesh, start: int, stop: int) -> dict[str, torch.Tensor]:
    form, policy = form_of(model), policy_of(model, mesh)
    algorithm, learner = algorithm_of(policy, 80, form=form), LEARNER.model_copy(update={"checkpoint_every": 2})
    checkpoints = Checkpoints(folder, model, learner, algorithm.optimizer, versions=100)
    assert checkpoints.restore(policy) == start
    for version in range(start, stop):
        algorithm.step(policy, make_pictured(form, version).part(version, [15], 0))
        checkpoints.save(policy, version + 1)
    checkpoints.close()
    return world.weights(policy)


@pytest.mark.parametrize(("tied", "kind"), covered([False, True], ["qwen2_5_vl", "qwen3_vl"], strength=1))
def test_export_loads(tmp_path: Path, mesh, tied: bool, kind: str) -> None:
    """In transformers, with equal log-probabilities, and with all that a processor needs."""
    model = seeing_model(tmp_path / "model", kind, tied=tied)
    form, policy = form_of(model), policy_of(model, mesh)
    batch = make_pictured(form)
    step = algorithm_of(policy, 80, form=form)
    step.step(policy, batch.part(3, [15], 0))
    export.write(export.collect(policy), model, tmp_path / "out")
    ours = policy_of(model.model_copy(update={"path": str(tmp_path / "out")}), mesh)
    before, after = world.weights(policy), world.weights(ours)
    assert before.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    found: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    own, info = found
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert form_of(model.model_copy(update={"path": str(tmp_path / "out")})) == form
    packed = Batch.from_part(batch.part(3, [15], 0), 10**6, form=form).microbatches[0]
    got = policy.score(policy.place(packed))
    for row in (0, 3, 6):  # no placeholder was sampled in them
        want = own_logprobs(own, batch, row, form).detach()
        chosen = torch.from_numpy(Sample.unpack(batch.entries[row].sample).sampled.numpy() == 1)
        torch.testing.assert_close(got[(packed.sequence == row) & packed.sampled], want[chosen], rtol=0, atol=1e-5)


def test_images_are_in_their_segments(seeing: ModelConfig, mesh) -> None:
    """Two samples of one row, and the same as one sample of two segments: both show the row's image and their own."""
    form = form_of(seeing)
    batch = make_pictured(form)
    one, other = (Sample.unpack(entry.sample) for entry in batch.entries[9:11])
    size = one.tokens.shape[0]
    later = [image.model_copy(update={"start": image.start + size}) for image in other.images]
    both = {name: np.concatenate([getattr(each, name).numpy() for each in (one, other)]) for name in Sample.DTYPES}
    changes = {name: Array.of(array) for name, array in both.items()}
    sample = one.model_copy(update=changes | {"starts": [0, size], "images": [*one.images, *later]})
    assert sample.row_images == [0, None, 0, None]
    assert sample_stats(sample.pack()).row_images == 1
    entries = [batch.entries[9]._replace(sample=sample.pack())]
    segmented = batch._replace(entries=entries).part(3, [1], 0)
    parted = batch._replace(entries=batch.entries[9:11]).part(3, [2], 0)
    for share in (False, True):
        (ours,), (theirs,) = (
            Batch.from_part(part, 10**6, share_prompts=share, form=form).microbatches for part in (segmented, parted)
        )
        assert ours.images is not None and theirs.images is not None
        for name in ("tokens", "positions", "cu_seqlens", "sampled", "predictor"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert torch.equal(ours.images.places, theirs.images.places)
        assert torch.equal(ours.images.pixels, theirs.images.pixels)
        assert set(ours.sequence.tolist()) == {0}
