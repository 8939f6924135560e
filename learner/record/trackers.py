"""Experiment trackers that get the records of `metrics.py`: TensorBoard, Weights & Biases, SwanLab. The run never waits
for them.

Each runs in its own thread on learner rank 0 and reads a queue. One that is missing, fails or hangs costs a warning,
never the run, and metrics.jsonl has the records anyway.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

log = logging.getLogger(__name__)
Record = Mapping[str, float]
LAST_S = 10.0
"""Time that a tracker gets at the end to send the rest of its queue."""


class Tracker:
    """`tracker(record)` returns at once; `close` waits for at most LAST_S."""

    def __init__(self, name: str, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self._queue: SimpleQueue[Record | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(folder, run, config), name=name, daemon=True)
        self._thread.start()

    def __call__(self, record: Record) -> None:
        self._queue.put(record)

    def close(self) -> None:
        """End the tracker's thread."""
        self._queue.put(None)
        self._thread.join(LAST_S)

    def _serve(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        try:
            track = TRACKERS[self.name](folder, run, config)
            while (record := self._queue.get()) is not None:
                track(record)
        except Exception as error:  # the thread's outermost boundary; trackers may raise anything
            reason: object = error
            if isinstance(error, ModuleNotFoundError) and error.name:
                reason = f'{error.name} is not installed; pip install -e ".[tracking]" installs all trackers'
            log.warning("log.trackers: %s failed, metrics.jsonl has the records anyway: %s", self.name, reason)


def tensorboard(folder: Path, run: str, config: Mapping[str, Any]) -> Callable[[Record], None]:
    """Event files in `folder`/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter  # an optional dependency

    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```")

    def track(record: Record) -> None:
        for key, value in record.items():
            writer.add_scalar(key, value, int(record["version"]))
        writer.flush()

    return track


def wandb(folder: Path, run: str, config: Mapping[str, Any]) -> Callable[[Record], None]:
    """Weights & Biases, under the project `headrace`; its environment variables (WANDB_MODE, WANDB_PROJECT) apply.
    Where the service cannot be reached or has no key, the records are kept in `folder`, and a warning says so."""
    import wandb as service

    options = {"project": "headrace", "name": run, "id": run, "dir": str(folder), "config": dict(config)}
    try:
        session = service.init(resume="allow", **options)
    except service.errors.Error as error:
        kept = f"its records are kept below {folder / 'wandb'}, to be sent with `wandb sync`"
        log.warning("log.trackers: wandb is offline, %s: %s", kept, error)
        session = service.init(mode="offline", **options)
    return lambda record: session.log(dict(record), step=int(record["version"]))


def swanlab(folder: Path, run: str, config: Mapping[str, Any]) -> Callable[[Record], None]:
    """SwanLab, under the project `headrace`."""
    import swanlab as service

    service.init(project="headrace", experiment_name=run, logdir=str(folder / "swanlab"), config=dict(config))
    return lambda record: service.log(dict(record), step=int(record["version"]))


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "swanlab": swanlab}
