"""Records what a real run shows of itself while it starts, trains and ends, for tests of its page and advice.

`python -m tests.harness.recorded_run RUN FILE` asks a run's buffer once a second until Ctrl-C. FILE has the run's
records as they come, and a line for each look: its time, when the run was launched, and the buffer's State. If the
buffer does not answer, the State is read from its file. `keep` makes a small recording with the looks that a test
needs. `replay` shows the run as it was at each look.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.watch.metrics_log import Position, Records, read_after
from actors.watch.run_state import ask, stored
from buffer.store.faults import StoreError
from buffer.wire.protocol import State
from configs.flow.alerts import ALERTS
from configs.inner_command import inner_words
from configs.load import ConfigError, load

LOOK = "look"
"""The key of a look's time."""
ALERTING = "|".join(re.escape(key) for key, *_ in ALERTS)
KEPT = re.compile(
    rf"version$|kind$|time|tokens$|reward/mean$|groups/solved|age/m|gpus$|servers/(known|heard|running|places)|"
    rf"server/[^/]+/(places|places_taken|parked|running|waiting|tokens_per_s)$|buffer/version$|({ALERTING})$"
)
"""Keys of a record."""


@dataclass(frozen=True)
class Look:
    """A run as it was at `time`."""

    time: float
    launched: float
    state: State | None
    """None: the buffer did not answer, and its file had no State."""
    answers: bool
    records: Records


async def record(run: Path, out: Path) -> None:
    """Look at the run once a second, until cancelled."""
    position = Position()
    with out.open("w") as file:
        while True:
            with suppress(FileNotFoundError, ConfigError):
                records, position, _ = read_after(run / "metrics.jsonl", position)
                config = load([str(run / "config.yaml")], lenient=True)
                state, held, launched = await ask(config), None, (run / "config.yaml").stat().st_mtime
                with suppress(StoreError):
                    held = None if state else stored(run / config.buffer.path)
                shown = state or held
                look = {LOOK: round(time.time(), 3), "launched": round(launched, 3), "answers": state is not None}
                look["state"] = json.loads(shown.model_dump_json(exclude_defaults=True)) if shown else None
                file.writelines(json.dumps(one) + "\n" for one in [*records, look])
                file.flush()
            await asyncio.sleep(1.0)


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a recording."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def keep(file: Path, times: list[int]) -> list[dict[str, Any]]:
    """A recording with the looks nearest to `times`, in seconds from the first look, and the keys that pages and advice
    read."""
    lines = lines_of(file)
    looks = [line for line in lines if LOOK in line]
    kept = [min(looks, key=lambda look: abs(look[LOOK] - looks[0][LOOK] - at)) for at in times]
    found = list[dict[str, Any]]()
    for line in lines:
        small = line if LOOK in line else {key: _short(value) for key, value in line.items() if KEPT.match(key)}
        if (line in kept or LOOK not in line) and small not in found:  # a learner that restores writes all records anew
            found.append(small)
    return found


def _short(value: Any) -> Any:
    return value if not isinstance(value, float) or value > 1e9 else float(f"{value:.4g}")


def replay(file: Path, metrics: Path) -> Iterator[Look]:
    """Each look of a recording; `metrics` has the records that were there at that time."""
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.write_text("")
    for line in lines_of(file):
        if LOOK not in line:
            with metrics.open("a") as out:
                out.write(json.dumps(line) + "\n")
            continue
        state = State.model_validate_json(json.dumps(line["state"])) if line["state"] else None
        yield Look(line[LOOK], line["launched"], state, line["answers"], Records(metrics))


if __name__ == "__main__":
    inner_words("RUN", "FILE")
    with suppress(KeyboardInterrupt):
        asyncio.run(record(Path(sys.argv[1]), Path(sys.argv[2])))
