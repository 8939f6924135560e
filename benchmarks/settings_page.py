"""`python -m benchmarks.settings_page [--out docs/settings.md]`: writes the page of settings by model size and GPUs.

For each size, layout and card: what `auto` takes, memory, speed, by the forecast that `python -m configs --gpu` prints
(`actors/doctor/forecast.py`); beside it what was measured, from `benchmarks/results`. Needs no GPU; takes some seconds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from actors.doctor.forecast import Forecast, forecast
from benchmarks.memory.combinations import MODELS
from configs.flow.cards import CARDS, Card
from configs.load import ConfigError
from configs.schema import Config
from learner.model.memory import GIB

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/settings.md"
RUN_FILE = ROOT / "configs/eight_gpus.yaml"
SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B")
LAYOUTS = ((1, 1), (2, 2), (4, 4))
"""GPUs that learn, and GPUs that serve."""
CARD_SIZES = {"H100": "80 GB", "H200": "141 GB"}
"""Cards of the table, with the size in their names."""
PROMPT, ANSWER, GROUPS, SAMPLES = 512, 2048, 128, 8
ADAPTER = {"lora": {"rank": 32}}
HEAD = """# Settings by model size and GPU

This page is written by `python -m benchmarks.settings_page --out docs/settings.md`; a test compares both.
A run file needs none of these settings: the learner and the servers decide what is `auto` at their start. For your own
model, lengths and card ask `python -m configs RUN.yaml --gpu H100` ([what a run takes](fits.md#what-a-run-takes)).

Sizes are Qwen2.5's. Prompts have at most {prompt} tokens, answers at most {answer} and a quarter of that in the mean,
{groups} groups of {samples} samples a version, `max_staleness` 4. "2 + 2" are two GPUs that learn and two that serve.

- **Recomputation** is `learner.activation_checkpointing`; of "6 blocks" it is 6.
- **Memory** is what rank 0 and each other rank take, with their copies for the servers, in GiB. Estimated; the peaks
  that were measured [below](#measured) are within 5 % of the estimate.
- **Tokens/s** are sampled and trained tokens of the run. Estimated with an MFU of .46; .41 to .57 were measured.
- **Needs**: servers that keep the learner busy. If the row has more, give one of their GPUs to the learner.
- Where the whole model does not fit, the row has what does: an adapter (`model.lora: {{rank: 32}}`), or servers of
  several GPUs (`rollout.tensor_parallel`).

| model | GPUs | card | recomputation, gather, head chunk | microbatch | memory | tokens/s | needs |
|---|---|---|---|---|---|---|---|
"""


class MeasuredFigure(NamedTuple):
    """A row of the table of what was measured."""

    what: str
    card: str
    file: str
    row: str
    unit: str
    column: str = "value"


MEASURED = (
    MeasuredFigure(
        "a whole run of 1.5B, 1 + 1, answers of 512: sampled tokens/s", "H200", "defaults", "sampled tokens/s", ""
    ),
    MeasuredFigure(
        "a whole run of 7B, 2 + 1, answers of 512: sampled tokens/s", "H200", "defaults-7B", "sampled tokens/s", ""
    ),
    MeasuredFigure(
        "learner, 1.5B, 1 rank: tokens/s, prompts counted", "H200", "learner-gather", "ours-1.5b: tokens/s", ""
    ),
    MeasuredFigure("the same: peak memory", "H200", "learner-gather", "ours-1.5b: peak memory", "GiB"),
    MeasuredFigure("learner, 7B, 2 ranks: tokens/s", "H200", "learner-7b", "ours-7b-2-flash4: tokens/s", ""),
    MeasuredFigure("the same: peak memory", "H200", "learner-7b", "ours-7b-2-flash4: peak memory", "GiB"),
    MeasuredFigure("learner, 7B, 4 ranks: tokens/s", "H200", "learner", "ours-7b-4: tokens/s", ""),
    MeasuredFigure("learner, 7B with an adapter of rank 32, 1 rank: tokens/s", "H100", "learner-lora", "tokens/s", ""),
    MeasuredFigure("the same: peak memory", "H100", "learner-lora", "peak memory", "GiB"),
    MeasuredFigure(
        "learner, 3B that sees, tower frozen: peak memory", "H100", "vision", "learner's peak memory", "GiB"
    ),
    MeasuredFigure(
        "server, 1.5B, 512 sequences of 512: tokens/s", "H200", "rollout-1.5B", "server in full operation", ""
    ),
    MeasuredFigure(
        "server, 1.5B, 512 sequences of 512: tokens/s", "H100", "rollout-1.5B-H100", "server in full operation", ""
    ),
    MeasuredFigure("server, 7B, 512 sequences of 512: tokens/s", "H100", "rollout-7B", "server in full operation", ""),
)


def page(sizes: Sequence[str] = SIZES) -> str:
    """The page's text, with rows of `sizes`."""
    head = HEAD.format(prompt=PROMPT, answer=f"{ANSWER:,}", groups=GROUPS, samples=SAMPLES)
    return head + "\n".join(rows(sizes)) + "\n\n" + measured() + "\n" + run_file()


def rows(sizes: Sequence[str]) -> Iterator[str]:
    """A row for each size, layout and card."""
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            write_shape(Path(folder), size)
            for learn, serve in LAYOUTS:
                for name in CARD_SIZES:
                    yield row(size, learn, serve, CARDS[name], folder)


def write_shape(folder: Path, size: str) -> None:
    """Write the config.json of a model of this size."""
    sizes = MODELS[size] | {"max_position_embeddings": 32768, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(sizes))


def row(size: str, learn: int, serve: int, card: Card, folder: str) -> str:
    """One row: the first of whole model and adapter, and of servers of 1, 2, 4 GPUs, that fits."""
    cells = [size, f"{learn} + {serve}", f"{card.name}, {CARD_SIZES[card.name]}"]
    found = first_that_fits(learn, serve, card, folder)
    if found is None:
        return f"| {' | '.join([*cells, 'does not fit, with an adapter neither', '', '', '', ''])} |"
    learner, settled, speed = found.settled.learner, found.settled, found.speed
    assert speed is not None
    more = ["adapter of rank 32"] if found.config.model.lora else []
    wide = found.config.rollout.tensor_parallel
    more += [f"servers of {wide} GPUs"] if wide > 1 else []
    way, gather = learner.activation_checkpointing, learner.gather
    taken = [*more, f"{way} blocks" if isinstance(way, int) else way]
    taken += [f"gather {gather}" if isinstance(gather, int) else gather, f"{learner.head_chunk_tokens}"]
    memory = f"{settled.first.total / GIB:.0f}" + (f", {settled.others.total / GIB:.0f}" if settled.others else "")
    cells += [", ".join(taken), f"{settled.first.tokens:,}", memory, f"{round_off(speed.tokens_per_s):,}"]
    return f"| {' | '.join([*cells, str(speed.servers)])} |"


def first_that_fits(learn: int, serve: int, card: Card, folder: str) -> Forecast | None:
    for adapter in ({}, ADAPTER):
        for wide in (1, 2, 4):
            if serve % wide:
                continue
            try:
                return forecast(run(learn, serve // wide, wide, folder, adapter), card)
            except ConfigError:
                continue
    return None


def run(ranks: int, servers: int, tensor_parallel: int, folder: str, model: dict[str, Any]) -> Config:
    """The run of a row. Several ranks publish rows, as `auto` has it for a folder that holds these weights."""
    return Config.model_validate({
        "model": {"path": folder, **model}, "data": {"train": "none", "max_prompt_tokens": PROMPT},
        "reward": {"function": "none"}, "sampling": {"max_tokens": ANSWER}, "run": {"versions": 1000},
        "batch": {"groups": GROUPS, "samples": SAMPLES}, "learner": {"ranks": ranks},
        "rollout": {"servers": servers, "tensor_parallel": tensor_parallel},
        "weights": {"publish": "rows" if ranks > 1 and not model else "auto"},
    })  # fmt: skip


def round_off(number: float) -> int:
    """Two digits: an estimate has no more. Example: `round_off(32170) == 32000`"""
    unit = int(10 ** max(0, len(str(int(number))) - 2))
    return round(number / unit) * unit


def measured() -> str:
    """The table of what was measured, each with its file."""
    lines = ["## Measured", "", "| what | card | measured | file in `benchmarks/results` |", "|---|---|---|---|"]
    for one in MEASURED:
        found = json.loads((ROOT / f"benchmarks/results/{one.file}.json").read_text(encoding="utf-8"))
        (value,) = {row[one.column] for row in found["rows"] if one.row in row["what"]}
        shown = f"{value:.1f} {one.unit}" if one.unit else f"{round(value, -2):,.0f}"
        lines.append(f"| {one.what} | {one.card} | {shown} | `{one.file}.json`, {found['date']} |")
    return "\n".join(lines) + "\n"


def run_file() -> str:
    """The whole run file of 7B on eight H100s."""
    text = RUN_FILE.read_text(encoding="utf-8").rstrip()
    what = "`configs/eight_gpus.yaml`, whole: four GPUs learn, four serve. `auto` takes what the row 7B, 4 + 4 shows\n"
    what += "if `model.path` is a folder with weights. With a hub's name their size is not known in time: "
    what += "add `weights: {publish: rows}`."
    return f"## 7B on 8 H100s\n\n{what}\n\n```yaml\n{text}\n```\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page, docs/settings.md; without it the page is printed")
    args = parser.parse_args()
    text = page()
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
