"""From rows with images to prompts: the same tokens as the model's own processor makes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from buffer.data.images import ImageFormat
from configs.load import ConfigError
from configs.schema import Config
from rollout.episodes.prompts import Prompts, load_tokenizer
from rollout.errors import PromptError
from rollout.tasks.trajectory import place
from tests.harness.tiny_vlm import encoded, picture
from tests.harness.toy import ROOT

SIZES = [(56, 56), (75, 131), (30, 300)]
FILES = [encoded(picture(*size)) for size in SIZES]


def prompts(config: Config, **data: Any) -> Prompts:
    config = config.model_copy(update={"data": config.data.model_copy(update=data)})
    return Prompts(load_tokenizer(config), config, ImageFormat.of(config.model.path, config.data))


def tokens_of(made: Prompts, row: dict[str, Any]) -> list[int]:
    row, pictures = made.with_pictures(row)
    return made.tokens(row, pictures)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


IMAGE = {"type": "image", "text": None}
"""As parquet gives it: every part has the fields of all."""
ROWS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"problem": "<image>what?"}, user([IMAGE, {"type": "text", "text": "what?"}])),
    ({"problem": "red <image> blue<image>"}, user([{"text": "red "}, IMAGE, {"text": " blue"}, IMAGE])),
    ({"prompt": user("<image><image>which")}, user([IMAGE, IMAGE, {"text": "which"}])),
    (
        {"prompt": user([{"type": "text", "text": "a "}, IMAGE, {"type": "text", "text": " b <image>?"}])},
        user([{"text": "a "}, IMAGE, {"text": " b "}, IMAGE, {"text": "?"}]),
    ),
    (
        {"prompt": [*user("<image>?"), {"role": "assistant", "content": "red"}, *user("<image><image>?")]},
        [*user([IMAGE, {"text": "?"}]), {"role": "assistant", "content": "red"}, *user([IMAGE, IMAGE, {"text": "?"}])],
    ),
]


@pytest.mark.parametrize(("row", "chat"), ROWS)
def test_tokens_are_those_of_the_model_s_own_processor(config: Config, folder: Path, row: Any, chat: Any):
    from transformers import AutoProcessor

    made, files = prompts(config), FILES[: str(chat).count("'image'")]
    row, pictures = made.with_pictures({**row, "images": files})
    shown = [Image.fromarray(each.pixels) for each in pictures]
    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    tokens = made.tokens(row, pictures)
    assert tokens == processor(text=[text], images=shown)["input_ids"][0]
    placed = place(tokens, pictures)
    assert sum(each.picture.num_tokens for each in placed) == tokens.count(made.form.image_token)  # type: ignore[union-attr]
    assert all(tokens[each.start - 1] == made.form.vision_start for each in placed)  # type: ignore[union-attr]
    assert all(tokens[each.end] == made.form.vision_end for each in placed)  # type: ignore[union-attr]


def test_the_prompt_s_template_keeps_the_images_in_their_places(config: Config, tmp_path: Path):
    (tmp_path / "prompt.jinja").write_text("which? {{ content | trim }} = what")
    made = prompts(config, format_prompt=tmp_path / "prompt.jinja", system_prompt="colours")
    for row in ({"problem": " <image> red"}, {"prompt": user([IMAGE, {"type": "text", "text": " red"}])}):
        text = made.shown(tokens_of(made, row | {"images": FILES[:1]}))
        lines = made.form.padding  # type: ignore[union-attr]
        before = f"<|im_start|>system\ncolours<|im_end|>\n<|im_start|>user\nwhich? {lines}<|vision_start|>"
        assert text.replace("[UNK]", "=").startswith(before)
        assert f"<|vision_end|>{lines} red = what<|im_end|>" in text.replace("  ", " ")


def test_plain_text_marks_images_as_the_model_does(config: Config):
    made = prompts(config, chat_template="none")
    number = made.with_pictures({"images": FILES[:1]})[1][0].num_tokens
    text = made.shown(tokens_of(made, {"problem": "what <image>?", "images": FILES[:1]}))
    lines = made.form.padding  # type: ignore[union-attr]
    assert text == f"what {lines}<|vision_start|><|image_pad|> x {number}<|vision_end|>{lines}?"


def test_rows_without_images_are_text_whatever_stands_in_them(config: Config):
    made = prompts(config)
    assert "user\nwhat <image>?" in made.shown(made.tokens({"problem": "what <image>?"})).replace("[UNK]", "")


def test_the_longest_prompt_counts_the_images_tokens(config: Config):
    row, made = {"problem": "<image>?", "images": FILES[:1]}, prompts(config)
    length = len(tokens_of(made, row))
    assert length > made.with_pictures(row)[1][0].num_tokens
    assert len(tokens_of(prompts(config, max_prompt_tokens=length), row)) == length
    with pytest.raises(PromptError, match=rf"prompt longer than data.max_prompt_tokens {length - 1}") as caught:
        tokens_of(prompts(config, max_prompt_tokens=length - 1), row)
    for page, bound in (("vision", 2048), ("failures", 24)):
        words = str(caught.value).replace(str(length - 1), str(bound))
        assert words in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": "<image>?", "images": FILES[:2]}, r"1 placeholders <\|image_pad\|> for 2 images; mark each"),
        ({"problem": "<image><image>?", "images": FILES[:1]}, r"2 placeholders <\|image_pad\|> for 1 image"),
        ({"problem": "<image> <|image_pad|>?", "images": FILES[:1]}, r"2 placeholders .* never write <\|image_pad\|>"),
        ({"problem": "<|image_pad|>?", "images": []}, "1 placeholders .* for 0 images"),
        ({"problem": "<image>?", "images": [b"red"]}, "image 0 of the row: no image: the file begins with b'red'"),
        ({"problem": "<image><image>", "images": [FILES[0], FILES[1][:-400]]}, "image 1 of the row: a PNG file that"),
        ({"problem": "<image>?", "images": FILES[:1], "videos": [1]}, "the row has videos"),
        ({"prompt": user([{"type": "video"}, IMAGE]), "images": FILES[:1]}, "has a part of type 'video'"),
        ({"prompt": user(["<image>"]), "images": FILES[:1]}, "has a part of type 'str' that is '<image>'"),
    ],
)
def test_rows_that_cannot_be_shown_are_permanent_failures(config: Config, row: dict[str, Any], words: str):
    with pytest.raises(PromptError, match=words) as caught:
        tokens_of(prompts(config), row)
    assert caught.value.permanent and "\n" not in str(caught.value)


def test_an_image_that_is_too_long_is_a_permanent_failure_unless_images_become_squares(config: Config):
    made, row = prompts(config), {"problem": "<image>?", "images": [encoded(picture(1, 300))]}
    if made.form.side:  # type: ignore[union-attr]
        assert tokens_of(made, row).count(made.form.image_token) == 4  # type: ignore[union-attr]
        with pytest.raises(PromptError, match=r"2 placeholders .* for 1 image"):
            tokens_of(made, {"problem": "<image> <|vision_start|>?", "images": FILES[:1]})
        return
    with pytest.raises(PromptError, match="image 0 of the row: an image of 300 x 1") as caught:
        tokens_of(made, row)
    assert caught.value.permanent


def test_a_template_that_leaves_images_out_is_refused(config: Config, tmp_path: Path):
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    made = prompts(config, chat_template=tmp_path / "chat.jinja")
    with pytest.raises(PromptError, match=r"0 placeholders .* for 1 image"):
        tokens_of(made, {"problem": "<image>?", "images": FILES[:1]})


def test_a_text_model_is_shown_no_images(config: Config):
    made = Prompts(load_tokenizer(config), config)
    with pytest.raises(PromptError, match=r"the row has images, and the model of model.path sees none"):
        tokens_of(made, {"problem": "<image>?", "images": FILES[:1]})


def test_another_architecture_is_shown_text_alone(config: Config, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "mistral3", "vision_config": {}}')
    load_tokenizer(config).save_pretrained(tmp_path)
    other = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    assert ImageFormat.of(str(tmp_path), other.data) is None
    with pytest.raises(PromptError, match=r"the row has images, and the model of model.path sees none"):
        tokens_of(Prompts(load_tokenizer(other), other), {"problem": "<image>?", "images": FILES[:1]})
    line = r"model.freeze: \[vision\]: .* \(mistral3\) is trained on text alone; remove the key"
    with pytest.raises(ConfigError, match=line):
        ImageFormat.of(str(tmp_path), other.data, ("vision",))
