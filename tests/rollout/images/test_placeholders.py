"""Which placeholders need an image: those that were given, whatever the policy sampled."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.data.images import ImageFormat, Picture
from configs.load import load
from rollout.cage.user_task import UserTask
from rollout.episodes.episode import Episodes, Failure, Group
from rollout.episodes.placeholders import SampledSoFar, misplaced
from rollout.episodes.prompts import Prompts, load_tokenizer
from rollout.episodes.sampler import Sampler
from rollout.errors import EpisodeError
from rollout.tasks import Problem, Trajectory, load_task
from rollout.tasks.trajectory import PlacedImage, Task, single_turn
from tests.harness.fakes import FakeEngine, FakeRewards
from tests.harness.tiny_vlm import encoded, picture
from tests.rollout.images.conftest import RUN

HALF = (0.5, 0.5, 0.5)
FORM = ImageFormat("qwen2_5_vl", 14, 2, 2, HALF, HALF, 784, 78400, image_token=5, vision_start=3, vision_end=4)
TEXT = st.lists(st.integers(6, 9), max_size=4)


def shown(width: int) -> Picture:
    """A picture of `width` tokens."""
    return Picture(np.zeros((28, 28 * width, 3), np.uint8), FORM)


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[int], list[bool], list[PlacedImage]]:
    """Tokens, which of them were sampled, and the images; sampled image tokens anywhere."""
    tokens: list[int] = draw(TEXT)
    sampled, images = [False] * len(tokens), list[PlacedImage]()
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            own = draw(st.lists(st.integers(3, 9), min_size=1, max_size=5))
            tokens, sampled = tokens + own, sampled + [True] * len(own)
        else:
            images.append(PlacedImage(len(tokens), shown(draw(st.integers(1, 4)))))
            run = [5] * images[-1].picture.num_tokens + draw(TEXT)
            tokens, sampled = tokens + run, sampled + [False] * len(run)
    return tokens, sampled, images


def problems(tokens: list[int], sampled: Any, images: Any, form: ImageFormat | None = FORM, most: int = 8) -> list[str]:
    return list(misplaced(tokens, np.array(sampled, bool), images, form, most))


@given(samples())
def test_what_was_given_with_its_images_is_right(sample: tuple[list[int], list[bool], list[PlacedImage]]):
    assert not problems(*sample)


@given(samples(), st.data())
def test_each_image_that_is_missing_moved_or_too_many_is_named(sample: Any, data: st.DataObject):
    tokens, sampled, images = sample
    if not images:
        assert "and not all of these are placeholders" in problems(tokens, sampled, [PlacedImage(0, shown(1))])[0]
        return
    number = data.draw(st.integers(0, len(images) - 1))
    image = images[number]
    rest = images[:number] + images[number + 1 :]
    assert f"the placeholder at {image.start} has no image; append" in problems(tokens, sampled, rest)[0]
    for other in (PlacedImage(image.start + 1, image.picture), PlacedImage(image.start, shown(5))):
        assert problems(tokens, sampled, [*images[:number], other, *images[number + 1 :]])
    assert problems(tokens, sampled, [*images[: number + 1], image, *images[number + 1 :]])
    most = len(images) - 1
    assert f"; data.max_images is {most}" in problems(tokens, sampled, images, most=most)[0]
    assert " for a model that sees none" in problems(tokens, sampled, images, None)[0]


def test_what_is_no_image_is_named():
    assert "images are [b'red']; a list of PlacedImage" in problems([6], [0], [b"red"])[0]


@given(st.lists(st.tuples(TEXT, st.lists(st.integers(3, 9), min_size=1, max_size=4)), min_size=1, max_size=4))
def test_sampled_tokens_are_known_again_behind_the_same_tokens(turns: list[tuple[list[int], list[int]]]):
    so_far, tokens, sampled = SampledSoFar(), [1], [False]
    for given_tokens, completion in turns:
        tokens, sampled = tokens + given_tokens, sampled + [False] * len(given_tokens)
        so_far.add(tokens, completion)
        tokens, sampled = tokens + completion, sampled + [True] * len(completion)
    assert so_far.among(tokens).tolist() == sampled
    assert not so_far.among([2, *tokens[1:]]).any()
    cut = tokens[:-1]  # the task has dropped the stop
    assert so_far.among([*cut, 0]).tolist() == [*sampled[:-1], False]


# whole samples, with the tokens of a tiny model

FILES = [encoded(picture(56, 84)), encoded(picture(100, 60))]
ROW = {"problem": "<image>red<image>?", "answer": "x", "images": FILES}


def episodes(folder: Path, task: Task, said: list[int], **more: Any) -> tuple[Episodes, FakeEngine, FakeRewards]:
    lengths = ["--data.max_prompt_tokens=400", "--data.max_pixels=50176", "--sampling.stop=[]"]
    config = load([str(RUN), f"--model.path={folder}", *lengths])
    form = ImageFormat.of(str(folder), config.data)
    made, engine, rewards = (
        Prompts(load_tokenizer(config), config, form),
        FakeEngine(lambda prompt: said),
        FakeRewards(),
    )
    sampler = Sampler(engine, made, 1.0, 6, 300, form, more.get("most", 4))  # type: ignore[arg-type]
    return Episodes(made, task, sampler, rewards, 2), engine, rewards  # type: ignore[arg-type]


async def test_an_image_s_sample_says_where_it_is_and_the_reward_gets_no_file(folder: Path):
    made, engine, rewards = episodes(folder, single_turn, [5, 5, 9])
    outcome = await made.attempt(ROW)
    assert isinstance(outcome, Group)
    tokens = outcome.samples[0].tokens.numpy().tolist()
    starts = [place + 1 for place, token in enumerate(tokens) if token == 3]
    for sample in outcome.samples:
        assert [image.start for image in sample.images] == starts
        assert not any(image.data for image in sample.images) and len({i.digest for i in sample.images}) == 2
        assert sample.sampled.numpy().sum() == 3 and sample.tokens.numpy()[-3:].tolist() == [5, 5, 9]
    assert [[image.start for image in images] for images in engine.shown] == [starts, starts]
    assert all("images" not in answer.row and answer.row["answer"] == "x" for answer in rewards.answers)


async def look_again(problem: Problem, generate: Any, forget: bool = False, image: Any = FILES[1]) -> Trajectory:
    """Sample, be shown another image, sample again."""
    trajectory = Trajectory(problem.prompt)
    trajectory.take(await generate(trajectory.tokens))
    trajectory.show(image, problem)
    trajectory.take(await generate(trajectory.tokens, images=[] if forget else trajectory.images))
    return trajectory


async def test_an_image_of_a_later_turn_travels_as_its_file(folder: Path):
    made, engine, _ = episodes(folder, look_again, [3, 5, 5, 4])
    outcome = await made.attempt(ROW)
    assert isinstance(outcome, Group)
    assert [bool(image.data) for image in outcome.samples[0].images] == [False, False, True]
    assert outcome.samples[0].images[2].data == FILES[1]
    assert outcome.samples[0].images[2].digest == outcome.samples[0].images[1].digest
    assert sorted(len(images) for images in engine.shown) == [2, 2, 3, 3]


async def test_a_pil_image_is_shown_as_it_is(folder: Path):
    async def task(problem: Problem, generate: Any) -> Trajectory:
        return await look_again(problem, generate, image=picture(100, 60))

    outcome = await episodes(folder, task, [9])[0].attempt(ROW)
    assert isinstance(outcome, Group)
    assert outcome.samples[0].images[2].digest == outcome.samples[0].images[1].digest


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        (
            ROW,
            {"forget": True},
            r"generate: the placeholder at \d+ has no image; append images with Trajectory.show, and",
        ),
        (ROW, {"image": b"red"}, "the task raised ImageError: no image: the file begins with b'red'"),
        (ROW, {"image": encoded(picture(60, 60))[:-300]}, "the task raised ImageError: a PNG file that cannot be"),
        (ROW | {"images": [FILES[0], b""]}, {}, "image 1 of the row: no image: the file is empty"),
        (ROW | {"images": FILES[:1]}, {}, r"the prompt has 2 placeholders <\|image_pad\|> for 1 image"),
    ],
)
async def test_what_is_wrong_with_an_image_fails_its_group_by_name(folder: Path, row: Any, options: Any, words: str):
    async def task(problem: Problem, generate: Any) -> Trajectory:
        return await look_again(problem, generate, **options)

    outcome = await episodes(folder, task, [9])[0].attempt(row)
    assert isinstance(outcome, Failure)
    with pytest.raises(EpisodeError, match=words):
        raise EpisodeError(outcome.reason)


async def test_more_images_than_the_run_allows_are_refused(folder: Path):
    outcome = await episodes(folder, look_again, [9], most=2)[0].attempt(ROW)
    assert isinstance(outcome, Failure) and outcome.reason == "generate: 3 images; data.max_images is 2"


def test_a_text_model_is_shown_no_image():
    with pytest.raises(EpisodeError, match="show: the model sees no images"):
        Trajectory([1]).show(FILES[0], Problem({}, [1], None, 9))  # type: ignore[arg-type]


async def test_the_page_s_task_shows_a_part_of_the_image(folder: Path, tmp_path: Path):
    page = (RUN.parents[2] / "docs/vision-tasks.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "def zoom" in each)
    (tmp_path / "zoom.py").write_text(block)
    outcome = await episodes(folder, load_task(f"{tmp_path}/zoom.py:zoom"), [9])[0].attempt(ROW)
    assert isinstance(outcome, Group)
    assert [bool(image.data) for image in outcome.samples[0].images] == [False, False, True]


TASK = '''
import io, sys
from PIL import Image
from rollout.tasks import Trajectory

async def zoom(problem, generate):
    """Show the left half of the first image again."""
    trajectory = Trajectory(problem.prompt)
    trajectory.take(await generate(trajectory.tokens))
    if problem.row["answer"] == "half":
        seen = problem.images[0].picture.pixels
        trajectory.show(Image.fromarray(seen[:, : seen.shape[1] // 2]), problem)
    elif problem.row["answer"] == "none":
        assert problem.images == [] and problem.format is not None
    elif problem.row["answer"] == "file":
        trajectory.show(problem.row["images"][0], problem)
    else:
        trajectory.show(b"red", problem)
    assert "torch" not in sys.modules
    trajectory.take(await generate(trajectory.tokens, images=trajectory.images))
    trajectory.take(await generate(trajectory.tokens, images=trajectory.images))
    return trajectory
'''


async def test_a_users_task_in_its_worker_shows_images(folder: Path, tmp_path: Path):
    (tmp_path / "mine.py").write_text(TASK)
    data = ["--data.max_pixels=50176", "--rollout.task_workers=1"]
    config = load([str(RUN), f"--model.path={folder}", f"--rollout.task={tmp_path}/mine.py:zoom", *data])
    async with UserTask(config, None) as task:
        made, engine, _ = episodes(folder, task, [5, 9])
        file = await made.attempt(ROW | {"answer": "file"})
        half = await made.attempt(ROW | {"answer": "half"})
        wrong = await made.attempt(ROW | {"answer": "wrong"})
        none = await made.attempt({"problem": "which colours?", "answer": "none"})
    assert isinstance(file, Group) and isinstance(half, Group) and isinstance(wrong, Failure)
    assert isinstance(none, Group) and not none.samples[0].images
    first, _, again = file.samples[1].images
    assert again.data == FILES[0] and again.digest == first.digest and not first.data
    assert len(half.samples[0].images) == 3 and half.samples[0].images[2].digest != first.digest
    assert sorted(len(images) for images in engine.shown[:6]) == [2, 2, 3, 3, 3, 3]
    assert "mine.py:zoom raised ImageError: no image: the file begins with b'red'" in wrong.reason


async def test_what_a_worker_sends_in_place_of_images_fails_the_episode():
    from rollout.cage.user_task import ShownImages

    for sent in ([[1]], [["a", FILES[0]]], [[1, b"red"]], 7, [[1, None]]):
        with pytest.raises(EpisodeError, match="its images cannot be shown: "):
            await ShownImages(FORM).decoded(sent)
    with pytest.raises(EpisodeError, match=r"its images cannot be shown: the model sees none$"):
        await ShownImages(None).decoded([[1, FILES[0]]])
    assert await ShownImages(FORM).decoded([]) == []
