"""What tests of supervised fine-tuning share: a tiny model that reads ChatML, and runs of `python -m learner sft`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from configs.load import load
from configs.schema import Config
from tests.harness.chatml import SPECIAL, make_tokenizer
from tests.harness.tiny_vlm import encoded, picture
from tests.harness.world import LEARNER

END = "<|endoftext|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = [
    {"role": "user", "content": "17*6-9="},
    {"role": "assistant", "content": "<calc>17*6"},
    {"role": "user", "content": "102"},
    {"role": "assistant", "content": "93"},
]


def chatml_tokenizer(template: str = CHATML, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A token per byte, ChatML's marks, and an end of text."""
    made = make_tokenizer([*SPECIAL, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, pad_token=END, chat_template=template, clean_up_tokenization_spaces=False
    )


def chatml_model(folder: Path) -> Path:
    """A random Qwen2 with 2 layers and the tokenizer of `chatml_tokenizer`, in float32."""
    torch.manual_seed(0)
    tokenizer = chatml_tokenizer()
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=272,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def demonstrations(number: int = 24) -> list[dict[str, Any]]:
    """Rows of prompt and answer, and of several turns, of many lengths."""
    rows: list[dict[str, Any]] = []
    for index in range(number):
        if index % 3:
            rows.append({"messages": [TURNS[0], {"role": "assistant", "content": str(index) * (index % 7 + 1)}]})
        else:
            rows.append({"messages": [*TURNS[:3], {"role": "assistant", "content": f"{index} is it."}]})
    return rows


def seeing_demonstrations(folder: Path, number: int = 12) -> list[dict[str, Any]]:
    """Rows with an image, with several in two turns, one of them twice, and without; their files, of many sizes, are
    written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for index in range(number):
        names = [f"{index}-{each}.png" for each in range(2)]
        for each, name in enumerate(names):
            (folder / name).write_bytes(
                encoded(picture(40 + 9 * (index % 9), 150 - 11 * (index % 9) + 20 * each, 2 * index + each))
            )
        first, answer = {"role": "user", "content": "<image>which <image>?"}, {"role": "assistant", "content": "red"}
        more = [{"type": "text", "text": "what "}, {"type": "image"}, {"type": "text", "text": "?"}]
        then = [{"role": "user", "content": more}, {"role": "assistant", "content": "gold" + " blue" * (index % 4)}]
        if index % 3 == 0:
            rows.append({"problem": "<image>which colours?", "answer": "red gold", "images": names[:1]})
        elif index % 3 == 1:
            rows.append({"messages": [first, answer, *then], "images": [*names, names[0]]})
        else:
            rows.append({"messages": [{"role": "user", "content": "what?"}, answer]})
    return rows


def jsonl(file: Path, rows: Sequence[Any]) -> Path:
    """Write rows, one a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sft_run(folder: Path, rows: Sequence[Any] | None = None, **changes: dict[str, Any]) -> list[str]:
    """The words after `python -m learner` of a run in `folder`; `changes` by section."""
    if not (folder / "model").exists():
        chatml_model(folder / "model")
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "folder": str(folder), "versions": 6},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(jsonl(folder / "train.jsonl", demonstrations() if rows is None else rows))},
        "sft": {"rows": 8},
        "learner": {"lr": 1e-2, "warmup_versions": 2, "device": "cpu", "threads": 1, "checkpoint_every": 2},
    }
    for section, values in changes.items():
        sections[section] = sections.get(section, {}) | values
    name = sections["run"]["name"]
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(sections))
    return ["sft", str(folder / f"{name}.yaml")]


def sft_config(folder: Path, rows: Sequence[Any] | None = None, **changes: dict[str, Any]) -> Config:
    """The config of `sft_run`."""
    return load(sft_run(folder, rows, **changes)[1:])


def update(model: nn.Module, adamw: torch.optim.AdamW, learning_rate: float) -> None:
    """Clip the gradients of `model` as the learner does, and take torch's own step."""
    nn.utils.clip_grad_norm_(model.parameters(), LEARNER.max_grad_norm)
    for group in adamw.param_groups:
        group["lr"] = learning_rate
    adamw.step()
    adamw.zero_grad()
