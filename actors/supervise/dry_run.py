"""`python -m actors launch RUN.yaml --dry-run`: the model answers a few training problems, and the reward scores them.

Starts neither buffer nor learner, and leaves the run's folder alone.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from configs.entrypoint import DONE, FAILED
from configs.load import ConfigError, write
from configs.own_packages import command
from configs.plain_text import print_visible
from configs.schema import Config, EvalSet, MixedSource

ROWS = 8
SET = "dry_run"
SHOWN_CHARS = 2000


def main(config: Config, evaluate: Sequence[str] = ()) -> int:
    """Exit code: 0 if an answer got a reward, 1 if none did, else that of `evaluate`. Raises ConfigError."""
    model = model_folder(config.model.path)
    with tempfile.TemporaryDirectory(prefix="headrace-dry-run-") as folder:
        file, out = Path(folder) / "config.yaml", Path(folder) / "answers.json"
        write(tried(config, Path(folder)), file)
        print_visible(f"dry run: at most {ROWS} problems of data.train; the engine takes a minute to start on a GPU")
        code = subprocess.run(
            [*(evaluate or command("rollout", "evaluate")), str(file), "--models", str(model), "--out", str(out)]
        ).returncode
        if code:
            print_visible(f"dry run: evaluating ended with exit code {code}; see the lines above", sys.stderr)
            return code
        (record,) = json.loads(out.read_text(encoding="utf-8"))["models"]
    print_visible("\n".join(lines(record)))
    return DONE if record["failed"] < record["problems"] else FAILED


def model_folder(path: str) -> Path:
    """Raises ConfigError."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError([f"model.path: {path}: no folder, and the hub does not give it: {why}"]) from None


def tried(config: Config, folder: Path) -> Config:
    """The run with the first rows of its training data as its only set of evaluation."""
    train, columns = config.data.train, config.data.columns
    if not isinstance(train, Path):
        first: MixedSource = train[0]
        train, columns = first.path, first.columns if first.columns is not None else columns
    rows = EvalSet(path=train, limit=ROWS, samples=1, temperature=config.sampling.temperature)
    data = config.data.model_copy(update={"eval": {SET: rows}, "columns": columns})
    apart = config.run.model_copy(update={"folder": folder, "name": "dry-run"})
    return config.model_copy(update={"data": data, "run": apart})


def lines(record: dict[str, Any]) -> Iterator[str]:
    """The answers and what became of them, for people."""
    for example in record["examples"]:
        yield f"problem: {json.dumps(example['problem'], ensure_ascii=False)[:SHOWN_CHARS]}"
        yield f"answer: {example['answer'][:SHOWN_CHARS]}"
        yield f"reward: {example['reward']:g}, ended by {example['finish']}\n"
    scored = record["problems"] - record["failed"]
    yield f"{scored} of {record['problems']} answers were scored: mean reward {record['reward']:g}"
    yield from (f"failed: {reason}" for reason in record["reasons"])
