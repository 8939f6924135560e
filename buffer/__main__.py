"""`python -m buffer CONFIG`: a run's buffer, until told to stop. Also `tail|show|export` of a run, and `keys`.

The first SIGINT or SIGTERM stops it cleanly (exit 0: all that was received is committed and answered), the second at
once. Exit 2: something is wrong with config, data, keys, port or file, found before anything was started. Exit 1: the
file failed while it served.
"""

import asyncio
import logging
import signal
import sqlite3
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import uvloop

from buffer import inspect
from buffer.curve import buffer_keys
from buffer.keys import KeysError, make_keys
from buffer.ledger.rules import Ledger
from buffer.ledger.types import LedgerError
from buffer.problems import Problems, check_images, load_problems
from buffer.resources import collect_rarely, keep_memory, raise_open_files
from buffer.store.past import past
from buffer.store.sqlite import Store
from buffer.wire.clock import ListeningClock
from buffer.wire.handlers import Handlers, Limits
from buffer.wire.requests import PendingRequests
from buffer.wire.server import BufferServer, ListenError
from configs import load, resume
from configs.checks import check, existing
from configs.data.sources import needs_truth
from configs.entrypoint import BAD_INPUT, DONE, FAILED, StopSignals, configure_logging, run_and_exit
from configs.schema import Config

log = logging.getLogger("buffer")
PROG = "python -m buffer"
MISSED = 5
"""Heartbeats a server may miss before its leases end."""
REMEDY = "Make room on its disk, or move the run's folder to a sound one, and start the buffer again."


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`; returns the exit code."""
    configure_logging()
    command = argv[0] if argv else ""
    if command in inspect.COMMANDS:
        return inspect.main(argv)
    if command == "stats":
        print(f"{PROG} stats: there is no such command; `python -m actors status RUN` answers it", file=sys.stderr)
        return BAD_INPUT
    if command == "keys":
        return print_keys(load.read(argv[1:], f"{PROG} keys"))
    if command in ("-h", "--help"):
        commands = inspect.COMMANDS | {"keys": "make the run's keys", "stats": "`python -m actors status RUN`"}
        print(f"usage: {PROG} CONFIG, or {PROG} COMMAND ... RUN; COMMAND --help says more")
        print("\n".join(f"  {name:<8} {what}" for name, what in commands.items()), end="\n\n")
    config = load.read(argv, PROG, partial(check, files=("data.train", "data.image_dir", "run.folder")))
    try:
        uvloop.run(run(config))
    except (ListenError, KeysError, LedgerError, load.ConfigError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return BAD_INPUT
    except (sqlite3.Error, OSError) as error:
        print(f"{PROG}: {store_path(config)}: {error}; nothing unsaved was acknowledged. {REMEDY}", file=sys.stderr)
        return FAILED
    return DONE


def print_keys(config: Config) -> int:
    """Make the keys of a run unless they are there, and print their folder; returns the exit code."""
    try:
        print(make_keys(config.run.path / "keys"))
    except KeysError as error:
        print(f"{PROG} keys: {error}", file=sys.stderr)
        return BAD_INPUT
    return DONE


async def run(config: Config) -> None:
    """Listen, read everything back, serve until the first signal."""
    raise_open_files(config)
    keep_memory()
    keys = buffer_keys(config.buffer.address, config.run.path)
    limits, clock = limits_of(config), ListeningClock()
    async with BufferServer(config.buffer.address, limits.max_message, keys, clock) as server:
        room, truth, path = existing(config.run.path), needs_truth(config), store_path(config)
        index = path and path.with_name(f"{path.name}-rows")
        problems = load_problems(config.data.train, config.data, room, truth=truth, index=index)
        check_images(config, problems)
        changed = resume.changes(past(config).settings, config)
        with Store(path, config.buffer.fsync, problems, problems.digest) as store:
            store.record_settings(resume.settings(config), changed)
            load.write(config, config.run.path / "config.yaml")
            for change in changed:
                log.info("changed since the last launch: %s", change)
            handlers = Handlers(restored(config, store, problems, clock), store, problems, limits)
            if any(change.key == "rollout.servers" for change in changed):
                handlers.ledger.scale(None, by_person=True)  # what the run file says now is newer
            problems.listen(server.wake)
            log.info("run %s: %s problems, %s, %s", limits.run, len(problems), path or "memory", server.address)
            if handlers.ledger.finished():
                log.warning("the run is finished; to go on, raise run.versions or data.epochs and start again")
            collect_rarely()
            serving = asyncio.create_task(server.serve(PendingRequests(handlers, limits.max_message)))

            def drain(number: int) -> None:
                log.info("stopping (%s again to force quit)", signal.Signals(number).name)
                serving.cancel()

            with StopSignals(drain, last=True):  # the learner still needs the buffer for its last version
                await asyncio.wait({serving})
            if not serving.cancelled():
                serving.result()


def store_path(config: Config) -> Path | None:
    """The ledger's file; None: in memory."""
    return config.buffer.path and config.run.path / config.buffer.path


def restored(config: Config, store: Store, problems: Problems, clock: ListeningClock) -> Ledger:
    """Rebuild the ledger from the store. Leases stay valid and are renewed now. The time since `clock` was made, in
    which the data were read, is no part of the first lease."""
    clock.mark()
    batch = config.batch
    ledger = Ledger(
        len(problems),
        batch.groups,
        batch.max_staleness,
        target_staleness=batch.target_staleness,
        versions=config.run.versions,
        epochs=config.data.epochs,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        attempts=config.rollout.attempts,
        lease_s=MISSED * config.rollout.heartbeat_s,
        skip_zero_variance=batch.skip_zero_variance,
        max_failed_share=config.rollout.max_failed_share,
        shares=problems.shares,
        eval_every=config.eval.every if config.data.eval else None,
        recall=store.dropped,
    )
    ledger.restore(store.load(), clock.now())
    ledger.upcoming(1)  # the order of the epoch is drawn now, and not when the first server asks
    return ledger


def limits_of(config: Config) -> Limits:
    """What the answers depend on."""
    return Limits(
        run=config.run.name,
        fingerprint=resume.fingerprint(config),
        samples=config.batch.samples,
        max_bytes=int(config.buffer.max_gib * 2**30),
        max_message=config.buffer.max_message_mib * 2**20,
        keep=config.buffer.keep,
    )


if __name__ == "__main__":
    run_and_exit(main, log)
