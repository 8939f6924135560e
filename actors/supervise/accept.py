"""Whether a run may be launched: nobody runs it, the run file fits it, it is not finished, it can be forked.

Writes only a lock file, in a folder that exists. Takes no more than a second: no torch, no Ray, no data.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from buffer.store.lock import InUse, lock_of, locked
from buffer.store.past import BEGINS, Past, begin_with, losses, past
from configs import resume
from configs.checkpoint_files import (
    FORKED,
    MANIFEST,
    OWN_SUM,
    POSITION,
    complete,
    damage,
    fault,
    folder_of,
    manifest_of,
    newest,
    sum_of,
)
from configs.load import ConfigError
from configs.schema import Config, ServerRange
from configs.writing import removed_on_failure, write_text, writing

SHAPES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
"""A checkpoint fits only a model with the same values."""


class Source(NamedTuple):
    """A checkpoint from which a new run begins."""

    checkpoint: Path
    version: int

    def __str__(self) -> str:
        return f"{self.checkpoint}: version {self.version}, with its optimizer"


def hold(config: Config) -> int | None:
    """Lock the run's folder until this process ends. Raises ConfigError if it is in use."""
    run, held = config.run.path, None
    if not run.is_dir():
        return None
    ledger = lock_of(run / config.buffer.path) if config.buffer.path else None
    try:
        held = locked(run / "launch.lock")
        if ledger and ledger.exists():
            os.close(locked(ledger))  # a buffer started by hand holds it
    except InUse as error:
        if held is not None:
            os.close(held)
        remedy = f"see `python -m actors status {run}`; stop that one first, or choose another run.name"
        raise ConfigError([f"run.name: {run} is {error}: {remedy}"]) from None
    except OSError as error:
        raise ConfigError([f"run.folder: {run} cannot be written: {error.strerror}; name another one"]) from None
    return held


def judge(config: Config, loss_accepted: bool = False) -> tuple[list[str], str | None]:
    """News since the last launch, and why a finished run has nothing to do. Raises ConfigError or StoreError."""
    lost = losses(config)
    if lost and not loss_accepted:
        raise ConfigError(lost)
    known, checkpoints = past(config), config.run.path / "checkpoints"
    changed, version = resume.changes(known.settings, config), newest(checkpoints)
    if version < known.oldest:
        found = f"the newest in it is of version {version}" if version else "there is none in it"
        remedy = "bring the checkpoints back, or begin anew with another run.name"
        problem = f"{checkpoints}: {found}, but the run was trained to version {known.trained}"
        raise ConfigError([f"{problem} and its samples from before version {known.oldest} are gone; {remedy}"])
    news = [f"accepted: {line}" for line in lost]
    news += [f"changed since the last launch: {change}" for change in changed]
    if known.trained and not version:
        again = f"the {known.trained} versions trained so far are trained again, on the same batches"
        news.append(f"{checkpoints}: no checkpoint yet; {again}")
    return news, _finished(config, known, version)


def servers(config: Config) -> tuple[int, int]:
    """Servers to start with, and servers wanted unless a person says otherwise.

    The number wanted last holds, unless the run file has changed its own since.
    """
    known, wanted = past(config), config.rollout.servers
    least, changed = config.rollout.least_servers, {change.key for change in resume.changes(known.settings, config)}
    own = least
    if isinstance(wanted, ServerRange) and known.servers and not known.by_person:
        own = min(max(known.servers, wanted.min), wanted.max)
    is_held = known.by_person and "rollout.servers" not in changed
    return min(known.servers, least) if is_held else least, own


def _finished(config: Config, known: Past, version: int) -> str | None:
    run, versions = config.run, config.run.versions
    more, fork = "raise run.versions", f"begin another run from it with --run.name=NAME --fork-from {run.path}"
    if version >= versions:
        why = f"version {version} of {versions}"
    elif version and known.used_up and version == known.trained:
        why, more = f"its data ended at version {version} of {versions}", "raise data.epochs"
    else:
        return None
    done = f"run {run.name} is finished: {why}, in {folder_of(run.path / 'checkpoints', version)}"
    return f"{done}; to go on, {more}, or {fork}"


def source(config: Config, words: str) -> Source:
    """The checkpoint of `RUN` or `RUN@vN`. Raises ConfigError if the new run cannot begin from it."""
    name, at, number = words.rpartition("@v")
    if not at or not number.isdigit():
        name, number = words, ""
    run = next((path for path in (Path(name), config.run.folder / name) if path.is_dir()), None)
    if run is None:
        raise ConfigError([f"--fork-from: {name}: no such folder, nor is it a run in {config.run.folder}; name a run"])
    folder = run / "checkpoints"
    version = int(number or newest(folder))
    checkpoint = folder_of(folder, version)
    if version == 0 or (why := fault(checkpoint) or damage(checkpoint)):
        has = ", ".join(f"v{one}" for one in complete(folder)) or "none"
        broken = f"{checkpoint.name}: {why}" if version and checkpoint.exists() else f"no checkpoint {number}".strip()
        raise ConfigError([f"--fork-from: {run} has {broken}; complete checkpoints: {has}"])
    new, ledger = config.run.path, config.buffer.path or "config.yaml"
    if (new / "config.yaml").exists() or (new / ledger).exists() or complete(new / "checkpoints"):
        problem = f"run.name: {new} has begun already, so it cannot be forked from another run"
        raise ConfigError([f"{problem}; launch it without --fork-from to go on with it, or choose another run.name"])
    if version >= config.run.versions:
        problem = f"run.versions: {config.run.versions} is not above {version}, the version the fork begins with"
        raise ConfigError([f"{problem}; versions count on from there: raise it, or fork from an earlier one with @vN"])
    before = resume.written(run) or {}
    theirs, ours = _shapes(before.get("model.path", config.model.path)), _shapes(config.model.path)
    for name in theirs.keys() & ours.keys():
        if theirs[name] != ours[name]:
            problem = f"model.path: {config.model.path} has {name} {ours[name]}, the model of {run} {theirs[name]}"
            raise ConfigError([f"{problem}; a fork keeps the shapes of its model"])
    return Source(checkpoint, version)


def _shapes(model: str) -> dict[str, int]:
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    config = config.get("text_config", config)
    return {name: config[name] for name in SHAPES if name in config}


def copy(source: Source, run: Path) -> None:
    """Make `source` the only checkpoint of the new `run`; files are linked where the file system allows it. Raises
    WriteError."""
    final = folder_of(run / "checkpoints", source.version)
    partial = final.with_suffix(".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    with writing(final), removed_on_failure(partial), removed_on_failure(run / BEGINS):
        shutil.copytree(source.checkpoint, partial, copy_function=_link)
        _note_fork(partial)
        begin_with(run, source.version)
        partial.rename(final)


def _note_fork(checkpoint: Path) -> None:
    """Record in the manifest that another run made the checkpoint: its position among demonstrations is no use here."""
    manifest = manifest_of(checkpoint)
    if "files" in manifest:  # an earlier release wrote the files alone
        manifest = {name: value for name, value in manifest.items() if name != POSITION} | {FORKED: True}
        write_text(checkpoint / MANIFEST, json.dumps(manifest | {OWN_SUM: sum_of(manifest)}, indent=1))


def _link(old: str, new: str) -> None:
    """Files of a checkpoint never change."""
    with suppress(OSError):
        return os.link(old, new)
    shutil.copy2(old, new)
