"""A run file that is being written from the settings of another system."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.data.sources import count_rows

UNKNOWN = "no counterpart is known"
HUB = re.compile(r"^[\w.-]+/[\w.-]+(@[\w.-]+)?$")
"""A data set on the hub, `owner/name` or `owner/name@split`."""
FILES = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".gz")


class Given:
    """The other system's settings. A setting that nobody takes has no counterpart."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.used: set[str] = set()

    def take(self, *keys: str, default: Any = None) -> Any:
        """All of the keys count as used."""
        self.used.update(keys)
        return next((self.settings[key] for key in keys if self.settings.get(key) is not None), default)

    def left(self) -> list[str]:
        return [key for key, value in self.settings.items() if key not in self.used and value is not None]


@dataclass
class Draft:
    """The run file, and lines for people."""

    tree: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What a setting became, if more than its name changed."""
    missing: list[str] = field(default_factory=list)
    """`key: value: why it has no counterpart, what to do`."""

    def set(self, key: str, value: Any) -> None:
        if value is None:
            return
        *sections, leaf = key.split(".")
        below = self.tree
        for section in sections:
            below = below.setdefault(section, {})
        below[leaf] = value

    def note(self, line: str) -> None:
        self.notes.append(line)

    def lacks(self, key: str, value: Any, why: str) -> None:
        self.missing.append(f"{key}: {value}: {why}")


def rename(given: Given, draft: Draft, table: Mapping[str, str]) -> None:
    for theirs, ours in table.items():
        draft.set(ours, given.take(theirs))


def list_the_rest(given: Given, draft: Draft, reasons: Mapping[str, str]) -> None:
    """`reasons` are by key, or by the beginning of keys (`critic.`). A text that begins with `=` is for settings that
    need no counterpart."""
    for key in given.left():
        reason = next((reasons[start] for start in _beginnings(key) if start in reasons), UNKNOWN)
        if reason.startswith("="):
            draft.note(f"{key}: {reason.removeprefix('=').strip()}")
        else:
            draft.lacks(key, given.settings[key], reason)


def _beginnings(key: str) -> list[str]:
    parts = key.split(".")
    return [key, *(".".join(parts[:end]) + "." for end in range(len(parts) - 1, 0, -1))]


def data_path(draft: Draft, key: str, value: Any, split: str = "train") -> Any:
    if isinstance(value, list):
        paths = [data_path(draft, key, each, split) for each in value]
        return paths[0] if len(paths) == 1 else [{"path": path} for path in paths]
    text = str(value)
    if not HUB.match(text) or text.endswith(FILES) or Path(text).exists():
        return text
    name, _, own = text.partition("@")
    place = f"data/{name.rpartition('/')[2]}/{own or split}.parquet"
    draft.lacks(key, text, f"data sets are read from files; download this one's split {own or split} to {place}")
    return place


def run_name(value: Any) -> str | None:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-") or None if value else None


@dataclass(frozen=True)
class Steps:
    """Another system makes `updates` optimizer steps with `prompts` prompts. A version is one optimizer step: so a
    batch has the prompts of one update."""

    prompts: int
    updates: int


def set_steps(draft: Draft, steps: Steps, samples: int, counted: str) -> None:
    groups = max(1, steps.prompts // steps.updates)
    draft.set("batch.groups", groups)
    draft.set("batch.samples", samples)
    draft.set("batch.max_staleness", max(1, steps.updates - 1))
    each = f"{steps.updates} versions" if steps.updates > 1 else "one version"
    draft.note(
        f"a version is one optimizer step: {counted} make a step {each} of batch.groups {groups} x {samples} samples"
    )
    ages = f"its {steps.updates} updates train data that is up to {steps.updates - 1} versions old"
    why = ages if steps.updates > 1 else "servers generate while the learner trains"
    draft.note(f"batch.max_staleness {max(1, steps.updates - 1)}: {why}; 0 is synchronous, dppo allows 4 and more")


def set_versions(draft: Draft, steps: int | None, epochs: Any, updates: int, rows: int | None, prompts: int) -> None:
    """Set `run.versions`: by a number of their steps, or by epochs of `rows` problems where those are known."""
    if steps and steps > 0:
        draft.set("run.versions", int(steps) * updates)
    elif epochs and rows:
        draft.set("run.versions", max(1, int(float(epochs) * rows) // prompts * updates))
    elif epochs:
        draft.lacks(
            "epochs",
            epochs,
            f"set run.versions to epochs x problems / {max(1, prompts // updates)} once the data is here",
        )


SCHEDULES = {
    **{name: name for name in ("constant", "linear", "cosine")},
    **{"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
}


def rows_of(draft: Draft) -> int | None:
    """Rows of `data.train`; None if they cannot be counted here."""
    train = draft.tree.get("data", {}).get("train")
    return count_rows(train) if isinstance(train, str) and "${" not in train else None


def set_every(given: Given, draft: Draft, updates: int, checkpoint: str, evaluation: str) -> None:
    """Set how often checkpoints and evaluations come. The two keys count steps."""
    for theirs, ours in ((checkpoint, "learner.checkpoint_every"), (evaluation, "eval.every")):
        every = given.take(theirs, default=-1)
        draft.set(ours, every * updates if every > 0 else None)
    if "eval" not in draft.tree["data"]:
        draft.tree.pop("eval", None)


def set_warmup(draft: Draft, key: str, ratio: float) -> None:
    if versions := draft.tree.get("run", {}).get("versions"):
        draft.set("learner.warmup_versions", round(ratio * versions))
    elif ratio:
        draft.lacks(key, ratio, "set learner.warmup_versions to this share of run.versions once that is known")
    else:
        draft.set("learner.warmup_versions", 0)


def set_schedule(draft: Draft, key: str, name: Any) -> None:
    draft.set("learner.schedule", SCHEDULES.get(name, "constant"))
    if name not in SCHEDULES:
        draft.lacks(key, name, "learner.schedule: constant is taken")


def split_gpus(draft: Draft, gpus: int, nodes: int, tensor_parallel: int) -> None:
    half = max(1, gpus // 2)
    servers = max(1, half // tensor_parallel)
    draft.set("learner.ranks", half)
    draft.set("learner.nodes", nodes // 2 if nodes > 1 and half % max(1, nodes // 2) == 0 and nodes > 3 else None)
    draft.set("rollout.servers", servers)
    draft.set("rollout.tensor_parallel", tensor_parallel if tensor_parallel > 1 else None)
    used = half + servers * tensor_parallel
    more = "; that is one GPU more than before" if used > gpus else ""
    draft.note(
        f"{gpus} GPUs: learner and servers have GPUs of their own: learner.ranks {half}, rollout.servers {servers} of"
        f" {tensor_parallel}{more}; `python -m configs RUN.yaml --gpu H100` shows how many servers the learner needs"
    )


def set_trackers(given: Any, draft: Draft) -> None:
    names = [given] if isinstance(given, str) else given or []
    known = [name for name in names if name in ("wandb", "tensorboard", "swanlab")]
    draft.set("log.trackers", known or None)
    for name in names:
        if name not in (*known, "console", "none", "all"):
            draft.lacks("logger", name, "metrics.jsonl has every metric; wandb, tensorboard and swanlab get copies")


def set_sampling(given: Given, draft: Draft, prefix: str) -> None:
    """Set the temperature, and list what else changes the sampled distribution."""
    temperature = given.take(f"{prefix}temperature")
    if temperature is not None and temperature > 0:
        draft.set("sampling.temperature", temperature)
    for key, off in (("top_p", (1, 1.0)), ("top_k", (-1, 0)), ("min_p", (0, 0.0)), ("repetition_penalty", (1, 1.0))):
        value = given.take(f"{prefix}{key}")
        if value is not None and value not in off:
            draft.lacks(f"{prefix}{key}", value, "answers are sampled from the policy itself; losses assume it")
