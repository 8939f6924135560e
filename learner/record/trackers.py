"""Experiment trackers: TensorBoard, Weights & Biases, SwanLab, each in its own thread on learner rank 0.

One that is missing, fails or hangs costs a warning, never the run. The learner ends without the interpreter's exit
hooks: `close` sends the rest.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

log = logging.getLogger(__name__)
Record = Mapping[str, float]
LAST_S = 10.0


class Tracker:
    """`tracker(record)` returns at once; `close` waits up to LAST_S."""

    def __init__(self, name: str, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self._queue: SimpleQueue[Record | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(folder, run, config), name=name, daemon=True)
        self._thread.start()

    def __call__(self, record: Record) -> None:
        self._queue.put(record)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            log.warning("log.trackers: %s has not taken its last records in %.0f s", self.name, LAST_S)

    def _serve(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        try:
            with TRACKERS[self.name](folder, run, config) as track:
                while (record := self._queue.get()) is not None:
                    track(record)
        except Exception as error:  # trackers may raise anything
            reason: object = error
            if isinstance(error, ModuleNotFoundError) and error.name:
                reason = f'{error.name} is not installed; pip install -e ".[tracking]" installs all trackers'
            log.warning("log.trackers: %s failed, metrics.jsonl has the records anyway: %s", self.name, reason)


@contextmanager
def tensorboard(folder: Path, run: str, config: Mapping[str, Any]) -> Iterator[Callable[[Record], None]]:
    """Event files in `folder`/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        writer.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```")

        def track(record: Record) -> None:
            for key, value in record.items():
                writer.add_scalar(key, value, int(record["version"]))
            writer.flush()

        yield track


@contextmanager
def wandb(folder: Path, run: str, config: Mapping[str, Any]) -> Iterator[Callable[[Record], None]]:
    """Weights & Biases; its environment variables apply. Offline or without a key, records stay in `folder`."""
    import wandb as service

    options = {"project": "headrace", "name": run, "id": run, "dir": str(folder), "config": dict(config)}
    try:
        session = service.init(resume="allow", **options)
    except service.errors.Error as error:
        _warn_offline("wandb", folder, error)
        session = service.init(mode="offline", **options)
    with session:
        yield lambda record: session.log(dict(record), step=int(record["version"]))


@contextmanager
def swanlab(folder: Path, run: str, config: Mapping[str, Any]) -> Iterator[Callable[[Record], None]]:
    """SwanLab. Offline as wandb."""
    import swanlab as service

    options = {"project": "headrace", "name": run, "log_dir": str(folder / "swanlab"), "config": dict(config)}
    try:
        session = service.init(**options)
    except (RuntimeError, OSError, service.exceptions.AuthenticationError) as error:  # no key, no service, a wrong key
        _warn_offline("swanlab", folder, error)
        session = service.init(mode="offline", **options)
    with session:
        yield lambda record: session.log(dict(record), step=int(record["version"]))


def _warn_offline(name: str, folder: Path, error: Exception) -> None:
    kept = f"its records are kept below {folder / name}, to be sent with `{name} sync`"
    log.warning("log.trackers: %s is offline, %s: %s", name, kept, error)


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "swanlab": swanlab}
