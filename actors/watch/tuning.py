"""A run of supervised fine-tuning: who trains it, what its losses say. It has no buffer to ask."""

from pathlib import Path

from actors.watch.metrics_log import Records, sets_of
from buffer.store.lock import holder
from configs.plain_text import figure
from configs.schema import Config
from configs.sft import LOCK

GO_ON = "python -m learner sft"
OVERFIT = 1.02
"""A held-out loss so many times its least one has begun to rise."""


def is_tuned(config: Config) -> bool:
    """Whether the run is one of supervised fine-tuning."""
    return config.sft.rows is not None


def tuner(config: Config, run: Path) -> str:
    """Id of the local process that trains the run; else empty."""
    return holder(run / LOCK) if is_tuned(config) else ""


def go_on(config: Config) -> str:
    """What to do about a run that nobody trains."""
    path = config.run.path / "config.yaml"
    return f"No process of this machine trains it. Go on with: {GO_ON} {path}"


def advice(records: Records) -> str:
    """One sentence: what to change."""
    if not records.by_version:
        return "No version is trained yet."
    for name, losses in held_out(records).items():
        last, least = max(losses), min(losses, key=losses.__getitem__)
        if losses[last] > OVERFIT * losses[least]:
            rise = f"{figure(losses[last], '.3f')} at version {last}, {figure(losses[least], '.3f')} at version {least}"
            remedy = "take an earlier checkpoint (learner.keep_best keeps the best), more rows or fewer versions"
            return f"The loss on {name} rises again, {rise}: {remedy}."
    return "Nothing has to change."


def held_out(records: Records) -> dict[str, dict[int, float]]:
    """Held-out losses by set and version."""
    found: dict[str, dict[int, float]] = {}
    for version, record in records.evaluations.items():
        for name, figures in sets_of(record).items():
            if "loss" in figures:
                found.setdefault(name, {})[version] = figures["loss"]
    return found
