"""Demonstrations with images: the tokens that they become, losses equal to those of transformers, and refusals."""

import gc
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForImageTextToText

from buffer.data.image_rows import ImageUnavailable
from buffer.data.images import ImageFormat, decode
from configs.load import ConfigError
from configs.schema import Config
from learner.certify.images import given_images
from learner.model.memory import budget_in
from learner.model.towers import PackedImages
from learner.model.vision import PATCHES_PER_TOKEN
from learner.sft.answer_loss import AnswerSteps, HeldOut
from learner.sft.answers import AnswerReader, TrainedText
from learner.sft.beside import Beside
from learner.sft.command import fitted, known
from learner.sft.demonstrations import Demonstrations, read_demonstrations
from learner.sft.packing import cut, microbatches
from learner.sft.row_images import DemonstratedImages, ImageChanged
from learner.train import collectives
from learner.train.optimizer import Optimizer
from learner.train.pictures import num_patches
from tests.harness.demonstrated import jsonl, seeing_demonstrations, sft_config, update
from tests.harness.pictured import Brought, form_of, make_pictured, seeing_model
from tests.harness.tiny_vlm import KINDS, encoded, picture, tiny_tokenizer
from tests.harness.world import LEARNER, algorithm_of, gradients, policy_of

SHAPE = {"layers": 2, "depth": 2}


def config_of(folder: Path, kind: str = "qwen3_vl", rows: Sequence[Any] | None = None, **changes: Any) -> Config:
    """A run of a tiny model that sees; images of at most 9 tokens."""
    model = folder / "model"
    if not model.exists():
        seeing_model(model, kind, tied=False, **SHAPE)
    size = {} if kind == "gemma3" else {"max_pixels": 9 * 32**2}
    train = jsonl(folder / "seen" / "train.jsonl", seeing_demonstrations(folder / "seen") if rows is None else rows)
    given = {"train": str(train)} | size | changes.pop("data", {})
    return sft_config(folder, [], data=given, **changes)


def read(config: Config, kind: str = "qwen3_vl", key: str = "data.train") -> Demonstrations:
    reader = AnswerReader(tiny_tokenizer(kind), config, form=ImageFormat.of_run(config))
    try:
        return read_demonstrations(config, key, config.data.sources()[key.removeprefix("data.")], reader)
    finally:
        reader.close()


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as error:
        read(config)
    (line,) = error.value.problems
    return line


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_images_take_their_tokens_and_answers_alone_are_trained(tmp_path: Path, mesh, kind: str) -> None:
    config = config_of(tmp_path, kind)
    data, form, tokenizer = read(config, kind), ImageFormat.of_run(config), tiny_tokenizer(kind)
    assert form is not None
    for number, ((text,), shown) in enumerate(zip(data.rows, (1, 3, 0) * 4, strict=True)):
        trained = tokenizer.decode(text.tokens[text.trained])
        answers = ("red gold<|im_end|>", f"red<|im_end|>gold{' blue' * (number % 4)}<|im_end|>", "red<|im_end|>")
        assert trained == answers[number % 3]
        assert len(text.images) == shown
        places = np.zeros(len(text.tokens), bool)
        for image in text.images:
            name = f"{number}-{image.picture.number % 2}.png"
            seen = decode((tmp_path / "seen" / name).read_bytes(), form)
            assert (seen.digest, seen.grid) == (image.picture.digest, image.picture.grid)
            assert text.tokens[image.start - 1] == form.vision_start
            assert text.tokens[image.start + seen.num_tokens] == form.vision_end
            places[image.start : image.start + seen.num_tokens] = True
        assert np.array_equal(places, text.tokens == form.image_token)


def test_turns_that_a_template_writes_anew_have_the_images_before_them(tmp_path: Path, mesh) -> None:
    """Qwen3's way: only a last answer has its thinking."""
    config = config_of(tmp_path)
    template = tiny_tokenizer().chat_template
    forgetful = template.replace(
        "{% if message.content",
        "{% if message.role == 'assistant' and loop.last %}<>{% endif %}{% if message.content",
        1,
    )
    file = tmp_path / "forgetful.jinja"
    file.write_text(forgetful)
    config = config_of(tmp_path, data={"chat_template": str(file)})
    first, last = read(config).rows[1]
    assert [len(first.images), len(last.images)] == [2, 3] and first.images == last.images[:2]
    assert [image.picture.number for image in last.images] == [0, 1, 2]


def own_loss(own: Any, form: ImageFormat, data: Demonstrations, texts: Sequence[TrainedText]) -> torch.Tensor:
    """transformers' loss of `texts`, one after another."""
    assert data.images is not None
    total, number = torch.zeros(()), sum(int(text.trained.sum()) for text in texts)
    for text, seen in zip(texts, data.images.open([text.images for text in texts]), strict=True):
        ids = torch.tensor(text.tokens, dtype=torch.int64)[None]
        labels = torch.where(torch.tensor(text.trained)[None], ids, -100)
        own.model.rope_deltas = None
        given = given_images(text.tokens, seen)
        total = total + own(input_ids=ids, labels=labels, **given).loss * int(text.trained.sum())
    return total / number


@pytest.mark.parametrize(
    "kind", [*KINDS[1:2], *(pytest.param(k, marks=pytest.mark.long) for k in KINDS if k != "qwen3_vl")]
)
def test_losses_and_steps_are_those_of_the_model_itself(tmp_path: Path, mesh, kind: str) -> None:
    config = config_of(tmp_path, kind)
    data, form = read(config, kind), form_of(config.model)
    texts = data.drawn(0, len(data))
    policy = policy_of(config.model, mesh)
    own = AutoModelForImageTextToText.from_pretrained(config.model.path, attn_implementation="eager").train()
    ours = Optimizer(policy, LEARNER, 10)
    steps, held_out = AnswerSteps(data, ours, 64, len(data)), HeldOut({"own": data}, None, 3, 64)
    adamw = torch.optim.AdamW(own.parameters(), lr=LEARNER.lr, betas=LEARNER.betas, weight_decay=0.0)
    (before,) = held_out.measure(policy, 0)
    for version in range(3):
        stats = steps.step(policy, version)
        loss = own_loss(own, form, data, texts)
        loss.backward()
        update(own, adamw, ours.learning_rate(version))
        assert stats["loss"] == pytest.approx(loss.item(), abs=3e-5)
        assert stats["microbatches"] > 1 and stats["images"] > 8 and stats["patches"] >= 4 * stats["images"]
        if version == 0:
            assert before.figures["own"]["loss"] == pytest.approx(stats["loss"], abs=1e-6)
    (after,) = held_out.measure(policy, 3)
    assert after.figures["own"]["loss"] == pytest.approx(own_loss(own, form, data, texts).item(), abs=1e-4)


def test_the_gradient_is_that_of_the_model_itself(tmp_path: Path, mesh) -> None:
    """Beside a batch of reinforcement learning with images too."""
    config = config_of(tmp_path)
    data, form, policy = read(config), form_of(config.model), policy_of(config.model, mesh)
    own = AutoModelForImageTextToText.from_pretrained(config.model.path, attn_implementation="eager").train()
    own_loss(own, form, data, data.drawn(0, len(data))).backward()
    algorithm, part = algorithm_of(policy, 64, form=form), make_pictured(form).part(3, [15], 0)
    batch = algorithm.pack(policy, part)
    algorithm.backward(policy, batch)
    alone = gradients(policy)
    algorithm.optimizer.discard()
    algorithm.backward(policy, batch, Beside(data, len(data), 0.5, 64).draw(policy, batch.version))
    both = gradients(policy)
    for name, parameter in own.named_parameters():
        added, wanted = both[name] - alone[name], 0.5 * parameter.grad
        assert (added - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6, name
    algorithm.optimizer.discard()
    seen = algorithm_of(policy, 64, form=form, beside=Beside(data, len(data), 0.5, 64)).step(policy, part)
    assert seen["images"] > algorithm_of(policy, 64, form=form).step(policy, part)["images"]


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_a_packed_row_is_each_of_its_texts_alone(tmp_path: Path, mesh, kind: str) -> None:
    config = config_of(tmp_path, kind)
    data, policy = read(config, kind), policy_of(config.model, mesh)
    texts = data.drawn(0, len(data))
    (whole,) = microbatches(policy, texts, data.images, 10**6)
    together = policy.score(policy.place(whole))
    (order,) = cut(texts, 0, 1, 10**6, policy.costs.quadratic, policy.costs.patch_cost)
    for text, (start, stop) in zip(order, pairwise(whole.cu_seqlens.tolist()), strict=True):
        (row,) = microbatches(policy, [text], data.images, 10**6)
        alone = policy.score(policy.place(row))
        torch.testing.assert_close(together[start:stop], alone, rtol=0, atol=2e-5)


def test_microbatches_count_tokens_and_patches_of_images(tmp_path: Path, mesh) -> None:
    config = config_of(tmp_path)
    data = read(config)
    texts = data.drawn(0, len(data))
    assert data.longest == max(len(text.tokens) for text in texts)
    assert data.patches == max(num_patches(text.images) for text in texts) > 36
    for rank in range(2):
        for chosen in cut(texts, rank, 2, 64):
            tokens, patches = sum(len(text.tokens) for text in chosen), sum(num_patches(text.images) for text in chosen)
            assert len(chosen) == 1 or (tokens <= 64 and patches <= 128)


def test_pixels_of_few_microbatches_are_in_memory(tmp_path: Path, mesh) -> None:
    """Pixels of a whole batch would be gigabytes: its rows share no images, as samples of a group do."""
    config = config_of(tmp_path)
    data, policy = read(config), policy_of(config.model, mesh)
    steps, alive = AnswerSteps(data, Optimizer(policy, LEARNER, 10), 16, len(data)), list[int]()

    def count() -> int:
        return sum(type(one) is PackedImages for one in gc.get_objects())

    class NotedImages(NamedTuple):
        images: DemonstratedImages

        def open(self, texts: Any) -> Any:
            alive.append(count())
            return self.images.open(texts)

    assert data.images is not None
    data.images, before = NotedImages(data.images), count()  # type: ignore[assignment]
    stats = steps.step(policy, 0)
    assert len(alive) == stats["microbatches"] > 6
    assert max(alive) - before <= 3, "of this microbatch, of the one before, and a blank image"


def test_pixels_of_few_microbatches_are_on_the_device_beside_samples_too(
    tmp_path: Path, mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    data, form, policy = read(config), form_of(config.model), policy_of(config.model, mesh)
    algorithm, brought = algorithm_of(policy, 30, form=form), Brought(monkeypatch)
    batch = algorithm.pack(policy, make_pictured(form).part(3, [15], 0))
    algorithm.backward(policy, batch, Beside(data, len(data), 0.5, 30).draw(policy, batch.version))
    assert brought.all > 8 and brought.most <= 3


def test_the_memory_estimate_counts_the_images_of_the_largest_row(tmp_path: Path, mesh) -> None:
    config = config_of(tmp_path)
    train, held_out = read(config), read(config_of(tmp_path, rows=seeing_demonstrations(tmp_path / "seen", 1)))
    fitting, patches = fitted(config, torch.device("cpu"), mesh, held_out, {"eval": train})
    assert patches == train.patches > held_out.patches and fitting.sft.max_tokens == train.longest
    with pytest.raises(ConfigError, match=f"and {patches} patches of images takes .*lower data.max_pixels"):
        budget_in(fitting, 2**20, 1, False, 0, patches)


def test_a_gpu_with_room_takes_a_batch_as_one_microbatch(tmp_path: Path, mesh) -> None:
    """Though images have more patches than a microbatch has for each of their tokens."""
    rows = seeing_demonstrations(tmp_path / "seen", 1)
    (tmp_path / "seen" / "0-0.png").write_bytes(encoded(picture(300, 300)))
    config = config_of(tmp_path, rows=rows, sft={"rows": 12}, data={"max_pixels": 64 * 32**2})
    data = read(config)
    fitting, patches = fitted(config, torch.device("cpu"), mesh, data, {})
    assert patches > PATCHES_PER_TOKEN * data.longest
    _, budget = budget_in(fitting, 2**37, 1, False, 0, patches)
    assert len(cut(data.drawn(0, 12), 0, 1, budget)) == 1


ROW = {"problem": "<image>which?", "answer": "red", "images": ["0-0.png"]}
CHAT = [{"role": "user", "content": "<image>which?"}, {"role": "assistant", "content": "red"}]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"images": ["none.png"]},
            "line 2: image 0: {seen}/none.png: No such file or directory; correct data.image_dir",
        ),
        ({"images": ["cut.png"]}, "line 2: image 0 of the row: a PNG file that cannot be decoded: "),
        ({"images": ["text.png"]}, "line 2: image 0 of the row: no image: the file begins with b'text'"),
        ({"images": ["wide.png"]}, "line 2: image 0 of the row: an image of 201 x 1 pixels; one side may be 200 times"),
        ({"images": ["0-0.png"] * 2}, "line 2: 1 <image> in its text, but 2 images; correct it, or leave it out"),
        ({"images": ["0-0.png"] * 9}, "line 2: 9 images, data.max_images is 8; raise it, or leave the row out"),
        ({"problem": "<image><|image_pad|>?"}, "line 2: the prompt has 2 placeholders <|image_pad|> for 1 image; mark"),
        ({"answer": "<|image_pad|>"}, "line 2: the prompt has 2 placeholders <|image_pad|> for 1 image; mark each"),
        (
            {"messages": [CHAT[0] | {"content": "what?"}, CHAT[1] | {"content": "<image>red"}]},
            "line 2: message 1 is an answer with an image, and only text is trained; leave the image out, or do not",
        ),
    ],
)
def test_a_row_whose_images_cannot_be_trained_is_named(tmp_path: Path, mesh, row: dict[str, Any], why: str) -> None:
    seen = tmp_path / "seen"
    good = seeing_demonstrations(seen, 1)
    (seen / "cut.png").write_bytes(encoded(picture(60, 60))[:-200])
    (seen / "text.png").write_text("text")
    (seen / "wide.png").write_bytes(encoded(picture(1, 201)))
    line = refused(config_of(tmp_path, rows=[*good, ROW | row]))
    assert line.startswith("data.train ") and why.format(seen=seen) in line


def test_an_image_in_a_column_of_another_name_is_not_left_out_in_silence(tmp_path: Path, mesh) -> None:
    rows = [{"problem": "<image>which?", "answer": "red", "image": "0-0.png"}]
    line = refused(config_of(tmp_path, rows=rows))
    assert "line 1: the row has a column image, and images are read from a list in the column images; write" in line
    alone = config_of(tmp_path, rows=rows, model={"path": str(tmp_path / "model"), "text_alone": True})
    assert read(alone).images is None, "other columns are left alone where the model sees nothing"


def test_a_long_row_may_be_shortened_by_smaller_images(tmp_path: Path, mesh) -> None:
    seen = seeing_demonstrations(tmp_path / "seen", 1)
    (tmp_path / "seen" / "0-0.png").write_bytes(encoded(picture(300, 300)))
    assert "shorten it, lower data.max_pixels, or set sft.too_long: drop" in refused(
        config_of(tmp_path, rows=seen, sft={"max_tokens": 24})
    )
    assert len(read(config_of(tmp_path, rows=seen, sft={"max_tokens": 24}, data={"max_pixels": 1024}))) == 1


def test_bytes_in_parquet_and_a_folder_of_images_are_read(tmp_path: Path, mesh) -> None:
    """They become the same texts as paths do."""
    config = config_of(tmp_path)
    by_path, rows, seen = read(config), seeing_demonstrations(tmp_path / "seen"), tmp_path / "seen"
    inside = [{"bytes": (seen / name).read_bytes(), "path": None} for name in rows[0]["images"]]
    pq.write_table(pa.Table.from_pylist([rows[0] | {"images": inside}]), tmp_path / "rows.parquet")
    (text,) = read(config_of(tmp_path, data={"train": str(tmp_path / "rows.parquet")})).rows[0]
    assert text.tokens.tolist() == by_path.rows[0][0].tokens.tolist() and text.images == by_path.rows[0][0].images
    apart = jsonl(tmp_path / "apart.jsonl", rows)
    again = read(config_of(tmp_path, data={"train": str(apart), "image_dir": str(seen)}))
    assert again.digest == by_path.digest
    (seen / "0-0.png").write_bytes(encoded(picture(40, 150, 999)))
    assert read(config).digest != by_path.digest


def test_rows_with_images_for_a_model_of_text_are_refused(tmp_path: Path, mesh) -> None:
    seeing = config_of(tmp_path)
    why = "8 rows have images, but model.path {} {}; {}, or leave these rows out"
    alone = seeing.model_copy(update={"model": seeing.model.model_copy(update={"text_alone": True})})
    words = "(qwen3_vl) is trained on text alone", "remove model.text_alone"
    assert refused(alone) == f"data.train {seeing.data.train}: {why.format(seeing.model.path, *words)}"
    text = config_of(tmp_path / "text", rows=[{"problem": "a", "answer": "b"}])
    assert read(text).images is None and text.model.path != seeing.model.path


def test_marks_without_images_are_text_and_warned_of(tmp_path: Path, mesh, caplog) -> None:
    """In a file in which no row has an image."""
    chat = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "red"}]
    rows = [{"problem": "what?", "answer": "red"}, {"problem": "<image>what?", "answer": "red"}, {"messages": chat}]
    with caplog.at_level("WARNING"):
        config = config_of(tmp_path, rows=rows)
        assert read(config).images is None
        (line,) = (record.getMessage() for record in caplog.records if "<image>" in record.getMessage())
        assert line.startswith(
            f"data.train {config.data.train}: line 2: the row has <image> and no images, as 1 more row of"
        )
        caplog.clear()
        read(config_of(tmp_path, rows=rows[:1]))
        read(config_of(tmp_path, rows=rows, model={"path": str(tmp_path / "model"), "text_alone": True}))
        assert not any("<image>" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("change", ["gone", "other", "pixels"])
def test_an_image_that_changes_ends_the_run_by_name(tmp_path: Path, mesh, change: str) -> None:
    config = config_of(tmp_path)
    data, policy, file = read(config), policy_of(config.model, mesh), tmp_path / "seen" / "0-0.png"
    steps = AnswerSteps(data, Optimizer(policy, LEARNER, 10), 64, len(data))
    if change == "gone":
        file.unlink()
        why = f"{file}: No such file or directory; bring the image back"
    elif change == "other":
        file.write_bytes(encoded(picture(40, 151)))
        why = f"{file}: changed since the start; bring back the image that was there"
    else:  # another node has another file of that name
        text = data.rows[0][0]
        read_ = text.images[0]._replace(picture=text.images[0].picture._replace(digest="0" * 64))
        data.rows[0] = [text._replace(images=(read_,))]
        why = "its pixels have the digest "
    with pytest.raises(ImageChanged) as raised:
        steps.step(policy, 0)
    line = str(raised.value)
    assert line.startswith(f"data.train {config.data.train}: line 1: image 0 of the row: {why}") and "\n" not in line


@contextmanager
def away(file: Path, for_s: float) -> Iterator[None]:
    """Opening `file` fails, but not because nothing is there."""
    kept = file.with_suffix(".kept")
    file.rename(kept)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(file))
        back = threading.Timer(for_s, kept.replace, [file])
        back.start()
        try:
            yield
        finally:
            back.cancel()
            back.join()


def test_a_read_waits_for_a_file_share_that_is_away(tmp_path: Path, mesh) -> None:
    data = read(config_of(tmp_path))
    assert data.images is not None
    with away(tmp_path / "seen" / "0-0.png", for_s=0.2):
        ((seen,),) = data.images.open([data.rows[0][0].images])
    assert seen.picture.digest == data.rows[0][0].images[0].picture.digest


def test_a_file_share_that_stays_away_ends_the_run_by_name(tmp_path: Path, mesh) -> None:
    """After half of `learner.timeout_s`, at the start and in training."""
    data = read(config_of(tmp_path, learner={"timeout_s": 0.2}))
    assert data.images is not None
    problem = "0-0.png: No such device or address; bring the image back"
    with away(tmp_path / "seen" / "0-0.png", for_s=600):
        with pytest.raises(ImageUnavailable, match=problem):
            list(data.images.of_row(0)["images"])
        with pytest.raises(ImageChanged, match=f"line 1: image 0 of the row: .*{problem}"):
            data.images.open([data.rows[0][0].images])


def test_all_ranks_end_where_one_lacks_an_image(tmp_path: Path, mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read(config_of(tmp_path))
    assert data.images is not None
    monkeypatch.setattr(collectives, "all_reduce_max", lambda *mine: [1.0])
    with pytest.raises(ImageChanged, match="another rank cannot train an image"):
        data.images.open([data.rows[2][0].images])


def test_keys_of_a_model_that_cannot_be_trained_with_images_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    known(config)
    for key, value in (("freeze", ["vision"]), ("text_alone", True)):
        text = sft_config(tmp_path / "text", model={key: value})
        with pytest.raises(ConfigError, match=rf"^model.{key}: .* is no vision-language model; remove the key$"):
            known(text)
