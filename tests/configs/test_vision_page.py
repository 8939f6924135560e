"""What docs/vision.md says of keys and tokens, and the run file for geometry with images."""

import re
from pathlib import Path

import pytest

from buffer.data.images import ImageFormat
from configs.checks import ENGINE_KEYS_SET
from configs.load import load
from configs.schema import Config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/vision.md").read_text(encoding="utf-8")
GEOMETRY = ROOT / "configs/geometry_vl.yaml"


def image_format(patch: int, max_pixels: int) -> ImageFormat:
    colours = (0.5, 0.5, 0.5)
    return ImageFormat(
        model_type="", patch=patch, merge=2, temporal=2, mean=colours, std=colours, min_pixels=1,
        max_pixels=max_pixels, image_token=0, vision_start=1, vision_end=2,
    )  # fmt: skip


def test_the_keys_of_the_page_exist() -> None:
    sections = Config.model_fields
    keys = set(re.findall(r"`([a-z]+)\.([a-z_]+)`", PAGE))
    assert ("data", "max_pixels") in keys
    for section, key in keys:
        if section in sections:
            assert key in sections[section].annotation.model_fields, f"{section}.{key}"


def test_the_engine_s_keys_that_are_headrace_s_own_are_on_the_page() -> None:
    (line,) = (line for line in PAGE.splitlines() if "of vLLM itself" in line)
    named = set(re.findall(r"`(\w+)`", line))
    assert named and named <= set(ENGINE_KEYS_SET)


@pytest.mark.parametrize("line", re.findall(r"^\| (\d+) \|[^|]*\| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.M))
def test_the_tokens_of_large_square_images(line: tuple[str, str, str]) -> None:
    pixels, *tokens = (int(number.replace(",", "")) for number in line)
    side = round(pixels**0.5)
    assert [image_format(patch, pixels).num_tokens(side, side) for patch in (14, 16)] == tokens


def test_geometry_s_prompts_hold_its_largest_image() -> None:
    config = load([str(GEOMETRY)])
    data = config.data
    assert data.max_pixels and data.min_pixels
    largest = data.max_images * data.max_pixels // image_format(14, data.max_pixels).factor ** 2
    assert largest < data.max_prompt_tokens
    assert config.rollout.engine["max_model_len"] == data.max_prompt_tokens + config.sampling.max_tokens
    said = GEOMETRY.read_text(encoding="utf-8")
    assert said.count(f"{largest:,}") == 2


def test_geometry_on_eight_gpus_is_the_command_of_its_first_lines() -> None:
    text = re.sub(r"\\\n#\s*", "", GEOMETRY.read_text(encoding="utf-8"))
    (overrides,) = re.findall(r"geometry_vl\.yaml (--run\.name.*)", text)
    config = load([str(GEOMETRY), *overrides.split()])
    assert config.learner.ranks + config.rollout.servers * config.rollout.tensor_parallel == 8
    assert "7B" in config.model.path


def test_geometry_explains_each_of_its_keys() -> None:
    lines = [line.strip() for line in GEOMETRY.read_text(encoding="utf-8").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#") and not line.endswith(":")]
    assert len(keys) > 30
    assert [line for line in keys if not re.search(r" # \w.{10}", line)] == []
