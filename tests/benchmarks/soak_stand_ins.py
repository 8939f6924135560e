"""`python -m tests.benchmarks.soak_stand_ins launch FILE --no-report`: a run to be soaked, without models.

The launcher's supervisor, its keepers and the buffer are the real ones. Learner and rollout servers are this module
too: they speak the samples wire with the real clients, and say in their logs and records what those they stand for
say. The servers read the version from the file that the learner writes, in place of weights.
"""

import asyncio
import json
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from actors.process import Process
from buffer.curve import client_keys_for
from buffer.wire.client import Connection, LearnerClient, RolloutClient, heartbeats
from buffer.wire.protocol import WorkItem
from configs.load import load
from configs.resume import fingerprint
from configs.schema import Config
from tests.harness.buffer_process import group

TRAIN_S, CHECKPOINT_EVERY, KEPT = 0.05, 3, 2


class Drained(BaseException):
    """Raised by SIGTERM."""


def learner(config: Config) -> None:
    """Train every batch by waiting, and record what the real one records of its size."""
    folder, records = config.run.path, config.run.path / "metrics.jsonl"
    print("none: 0.0 M parameters on 1 x cpu")
    checkpoints = folder / "checkpoints.json"
    kept = json.loads(checkpoints.read_text()) if checkpoints.exists() else [0]
    version = kept[-1]
    lines = records.read_text().splitlines()[:version] if records.exists() else []
    replaced(records, "".join(f"{line}\n" for line in lines))
    print("waiting for the buffer")
    keys = client_keys_for(config.buffer.address, folder, "learner")
    client = LearnerClient(
        config.buffer.address, "learner-0", fingerprint(config), 0, 1, "tcp://127.0.0.1:9", keys=keys
    )
    print(f"restored version {version}")
    client.rewind(version)
    with suppress(Drained):
        while part := client.take(version):
            replaced(folder / "version", str(version))
            time.sleep(TRAIN_S)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            version += 1
            if version % CHECKPOINT_EVERY == 0:
                kept = [*kept, version][-KEPT:]
                replaced(checkpoints, json.dumps(kept))
            rows = part.rows
            sums = {"tokens": int(rows.tokens.numpy().sum()), "tokens_sampled": int(rows.sampled.numpy().sum())}
            client.trained(version - 1, kept[0] if len(kept) == KEPT else 0)
            with records.open("a") as file:
                file.write(json.dumps({"version": version, "samples": int(rows.item.shape[0]), **sums}) + "\n")
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    client.close()


def replaced(path: Path, text: str) -> None:
    """Write a file so that a reader, and a start after a kill, sees all of it or what was there before."""
    partial = path.with_suffix(".tmp")
    partial.write_text(text)
    partial.replace(path)


def version_of(config: Config) -> int:
    """The version that the learner trains on."""
    path = config.run.path / "version"
    return int(path.read_text()) if path.exists() else 0


async def server(config: Config, name: str) -> None:
    """Make each group by waiting."""
    print(f"{name} waits for the buffer")
    keys = client_keys_for(config.buffer.address, config.run.path, "rollout")
    async with Connection(config.buffer.address, name, "rollout", fingerprint(config), keys=keys) as connection:
        buffer = RolloutClient(connection, lambda: version_of(config))
        await buffer.where(None)
        print(f"weights: the learner is at\ngenerating with version {version_of(config)}")

        async def make(item: WorkItem) -> None:
            await asyncio.sleep(TRAIN_S)
            await buffer.put(item, group(item.item, item.version, config.batch.samples))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(heartbeats(buffer, config.rollout.heartbeat_s, dict, lambda leases: None))
            while (items := await buffer.ask(config.batch.groups)) is not None:
                for item in items:
                    tasks.create_task(make(item))


def launch(file: str) -> int:
    """Keep the run, as `python -m actors launch` does once it has checked everything."""
    from actors.supervise.launch import keep, prepare, processes
    from actors.watch.display import Display

    config = load([file])

    def stand_in(process: Process) -> Process:
        if process.role == "buffer":
            return process
        words = (sys.executable, "-m", "tests.benchmarks.soak_stand_ins", process.role, process.argv[3], process.name)
        return replace(process, argv=words)

    made = [stand_in(process) for process in processes(config)]
    return keep(made, Display(config), partial(prepare, config))


def drain(number: int, frame: object) -> None:
    """The handler of SIGTERM."""
    raise Drained


if __name__ == "__main__":
    role, file, *rest = sys.argv[1:]
    if role == "launch":
        sys.exit(launch(file))
    signal.signal(signal.SIGTERM, drain)
    with suppress(Drained):
        learner(load([file])) if role == "learner" else asyncio.run(server(load([file]), rest[0]))
