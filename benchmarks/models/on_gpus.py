"""The section of docs/reference/models-trained.md about runs on GPUs, made of their results in benchmarks/results."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.weights.seeing import SEEING
from benchmarks.weights.shapes import text_config
from configs.expert_models import described

RUNS = ("whole*.json", "vision-*.json")
SHAPE = re.compile(r"--shape (\S+)")
PROBE, MISMATCH = "probe", "k3 of tokens"
"""How the names of these rows begin."""
HEAD = """

## Seen on GPUs

Runs of a learner and a vLLM server with random weights of true shapes, layers cut where the name ends in `cut`.
*Probe* is the mean difference of their log-probabilities of one text, in nats; k3 is of tokens that the newest policy
sampled. Policies were loaded into mixtures of experts and compared with transformers ([experts](../experts.md)):
{experts}.

| shape | `model_type` | GPUs | probe | k3 | with |
|---|---|---|---|---|---|
"""


def section(folder: Path) -> str:
    """Return the section, of the results in `folder`."""
    files = sorted({file for pattern in RUNS for file in folder.glob(pattern)})
    rows = (row for file in files for row in _rows(json.loads(file.read_text(encoding="utf-8"))))
    return HEAD.format(experts=described()) + "\n".join(rows) + "\n"


def _rows(result: dict[str, Any]) -> Iterator[str]:
    shape, probe = SHAPE.search(result["command"]), _largest(result, PROBE)
    if shape is None or not probe:
        return
    versions = ", ".join(f"{name} {number}" for name, number in sorted(result["versions"].items()))
    kind = (SEEING.get(shape[1]) or text_config(shape[1]))["model_type"]
    figures = f"{probe} | {_largest(result, MISMATCH) or '–'}"
    yield f"| {shape[1]} | `{kind}` | {result['hardware']} | {figures} | {versions}, {result['date']} |"


def _largest(result: dict[str, Any], begins: str) -> str:
    values = [row["value"] for row in result["rows"] if row["what"].startswith(begins)]
    return f"{max(values):.3g}" if values and max(values) > 0 else ""
