"""Rows with images where a whole run file is tried or evaluated."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.doctor.run_file import rows_to_try
from actors.doctor.trial import try_out
from buffer.data.images import ImageFormat
from buffer.problems import check_images, load_problems
from configs.load import ConfigError
from configs.schema import Config, EvalSet
from rollout import evaluate
from rollout.engine.arguments import engine_arguments, vllm_fields
from rollout.episodes.prompts import Prompts, load_tokenizer
from rollout.episodes.setup import RolloutSetup
from rollout.rewards.workers import RewardPool
from rollout.tasks.trajectory import single_turn
from tests.harness.fakes import FakeEngine
from tests.harness.tiny_vlm import encoded, picture
from tests.harness.weightless import add_weights

SCORE = """
def score(solution_str, ground_truth, extra_info):
    return float(ground_truth == "red")
"""


@pytest.fixture
def run(config: Config, tmp_path: Path) -> Config:
    """A run whose data have images: two rows with one each, one with none, one whose image is cut off."""
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(60, 60, number)))
    (tmp_path / "cut.png").write_bytes(encoded(picture(60, 60))[:-200])
    rows = [
        {"problem": "what <image>?", "answer": "red", "images": ["0.png"]},
        {"problem": "what?", "answer": "blue"},
        {"problem": "<image> which?", "answer": "gold", "images": ["1.png"]},
        {"problem": "<image>?", "answer": "red", "images": ["cut.png"]},
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "score.py").write_text(SCORE)
    data = {"train": tmp_path / "data.jsonl", "eval": {"eval": EvalSet(path=str(tmp_path / "data.jsonl"))}}
    reward = {"function": f"{tmp_path}/score.py:score", "kwargs": {}}
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "reward": config.reward.model_copy(update=reward),
            "run": config.run.model_copy(update={"folder": tmp_path}),
        }
    )


def test_the_trial_shows_the_first_prompt_and_counts_rows_that_cannot_be_shown(run: Config):
    rows = rows_to_try(load_problems(run.data.train, run.data))
    found = try_out(["prompts", "reward"], run, rows)
    assert not found.refused
    form = ImageFormat.of(run.model.path, run.data)
    assert form is not None
    number = form.num_tokens(60, 60)
    (fact,) = (line for line in found.facts if line.startswith("prompts: the prompt of row 0"))
    assert f"what <|vision_start|><|image_pad|> x {number}<|vision_end|>?<|im_end|>" in fact.replace("\\n", "")
    assert any(line.startswith("prompts: the prompt of row 1 has 10 tokens: '<|im_start|>") for line in found.facts)
    (warning,) = found.warnings
    assert "1 of 4 rows looked at make no prompt and are dropped, such as row 3: image 0 of the row: a PNG" in warning
    assert "gives 1, 0, 1 for empty answers to 3 rows" in str(found.facts)


def test_images_for_another_architecture_are_refused_when_the_run_file_is_judged(run: Config, tmp_path: Path):
    load_tokenizer(run).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    other = run.model_copy(update={"model": run.model.model_copy(update={"path": str(tmp_path / "other")})})
    assert try_out(["prompts"], other, [(0, {"problem": "?"})]).refused == []
    with pytest.raises(
        ConfigError, match=r"data.train .* \(llava\) is trained on text alone; name a model whose images"
    ):
        check_images(other, load_problems(other.data.train, other.data))
    alone = run.model_copy(update={"model": run.model.model_copy(update={"text_alone": True})})
    with pytest.raises(ConfigError, match=r"is trained on text alone; remove model.text_alone, or leave these rows"):
        check_images(alone, load_problems(alone.data.train, alone.data))


async def test_models_are_evaluated_on_rows_with_images(run: Config, tmp_path: Path):
    (add_weights(tmp_path) / "config.json").write_text("{}")
    sets = evaluate.chosen_sets(run, [tmp_path])
    (tmp_path / "1.png").unlink()
    form = ImageFormat.of(run.model.path, run.data)
    engine = FakeEngine(lambda prompt: [9, 2])
    setup = RolloutSetup(Prompts(load_tokenizer(run), run, form), single_turn, RewardPool(run.reward))
    async with setup.rewards:
        (record,) = await evaluate.evaluate_models(run, setup, engine, sets, [tmp_path])  # type: ignore[arg-type]
    assert (record["problems"], record["failed"], record["reward"]) == (4, 2, 0.5)
    assert "1.png: No such file or directory; bring the image back" in str(record["reasons"])
    assert "image 0 of the row: a PNG file that cannot be decoded" in str(record["reasons"])
    assert "images" not in json.dumps(record["examples"])
    assert sorted(len(images) for images in engine.shown) == [0, 1]


def test_images_for_a_text_model_are_refused_before_an_engine_starts(run: Config, tmp_path: Path):
    (add_weights(tmp_path) / "config.json").write_text('{"model_type": "qwen2"}')
    text = run.model_copy(update={"model": run.model.model_copy(update={"path": str(tmp_path)})})
    with pytest.raises(ConfigError, match=r"data.eval .*: 3 rows have images, but model.path .* is a text model"):
        evaluate.chosen_sets(text, [tmp_path])


def test_the_engine_knows_how_large_images_are(run: Config):
    form: Any = ImageFormat.of(run.model.path, run.data)
    plain, seeing = engine_arguments(run, 0, cpu=False), engine_arguments(run, 0, cpu=False, form=form)
    assert plain["skip_tokenizer_init"] and "limit_mm_per_prompt" not in plain
    sizes: Any = {"size": {"shortest_edge": form.min_pixels, "longest_edge": form.max_tokens * form.factor**2}}
    if form.side:
        sizes = {"size": {"height": form.side, "width": form.side}, "do_pan_and_scan": False}
    expected = {
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": 8, "video": 0},
        "mm_processor_kwargs": sizes,
        "mm_processor_cache_gb": 0,
    }
    if form.mutual:
        expected["disable_chunked_mm_input"] = True
    if "mm_device_do_normalize" in set(vllm_fields()):  # vLLM 0.26 normalises on the CPU only
        expected["mm_device_do_normalize"] = False
    assert {key: seeing[key] for key in seeing.keys() - plain.keys() | {"skip_tokenizer_init"}} == expected
    large = run.model_copy(update={"data": run.data.model_copy(update={"max_pixels": 4096 * form.factor**2})})
    wide: Any = replace(form, max_pixels=large.data.max_pixels, side=form.side and 64 * form.factor)
    assert engine_arguments(large, 0, cpu=False, form=wide)["max_num_batched_tokens"] == 4 * 4096


def test_the_engine_plans_for_the_image_with_the_most_tokens(run: Config):
    """vLLM would never schedule an image with more tokens than it expects."""
    form: Any = ImageFormat.of(run.model.path, run.data)
    given = engine_arguments(run, 0, cpu=False, form=form)["mm_processor_kwargs"]["size"]
    largest = given["height"] * given["width"] if form.side else given["longest_edge"]
    strip = form.num_tokens(20, 4000)
    assert largest // form.factor**2 >= strip > (0 if form.side else form.max_pixels // form.factor**2)


def test_the_trial_warns_of_marks_without_images(run: Config, tmp_path: Path):
    rows = [(0, {"problem": "what <image>?", "answer": "red"}), (1, {"problem": "what?", "answer": "red"})]
    (line,) = (line for line in try_out(["prompts"], run, rows).warnings if "<image>" in line)
    marked = "1 of 2 rows looked at have <image> and no images, such as row 0: the model reads <image> as text; name"
    assert line == f"data.train: {run.data.train}: {marked} their images in the column images"
    alone = run.model_copy(update={"model": run.model.model_copy(update={"text_alone": True})})
    assert not any("<image>" in line for line in try_out(["prompts"], alone, rows).warnings)
