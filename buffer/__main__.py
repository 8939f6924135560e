"""`python -m buffer CONFIG`: a run's buffer, until told to stop. Also `stats|tail|show|export` of a run, and `keys`.

The first SIGINT or SIGTERM stops it cleanly (exit 0: all that was received is committed and answered), the second at
once. Exit 2: something is wrong with config, data, keys, port or file, found before anything was started. Exit 1: the
file failed it.
"""

import asyncio
import logging
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvloop

from buffer import inspect
from buffer.ledger.rules import Ledger, LedgerError
from buffer.problems import load_problems
from buffer.store.sqlite import Store
from buffer.wire.curve import KeysError, make_keys, server_keys_for
from buffer.wire.handlers import Handlers, Limits
from buffer.wire.requests import PendingRequests
from buffer.wire.server import BufferServer, ListenError
from configs import load
from configs.checks import check
from configs.schema import Config

log = logging.getLogger("buffer")
PROG = "python -m buffer"
MISSED = 5
"""Heartbeats a server may miss before its leases end."""
REMEDY = "Make room on its disk, or move the run's folder to a sound one, and start the buffer again."


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`; returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    if argv and argv[0] in inspect.COMMANDS:
        return inspect.main(argv)
    if argv and argv[0] == "keys":
        print(make_keys(load.read(argv[1:], f"{PROG} keys").run.path / "keys"))
        return 0
    config = load.read(argv, PROG, partial(check, files=("data.train", "run.folder")))
    try:
        uvloop.run(run(config))
    except (ListenError, KeysError, LedgerError, load.ConfigError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except (sqlite3.Error, OSError) as error:
        print(f"{PROG}: {store_path(config)}: {error}; nothing unsaved was acknowledged. {REMEDY}", file=sys.stderr)
        return 1
    return 0


async def run(config: Config) -> None:
    """Listen, read everything back, serve until the first signal."""
    keys = server_keys_for(config.buffer.address, config.run.path)
    max_message = config.buffer.max_message_mib * 2**20
    async with BufferServer(config.buffer.address, max_message, keys) as server:
        problems = load_problems(config.data.train, config.data)
        load.write(config, config.run.path / "config.yaml")
        with Store(store_path(config), config.buffer.fsync, load.fingerprint(config), problems) as store:
            desk = PendingRequests(
                Handlers(restored(config, store, len(problems)), store, problems, rules(config)), max_message
            )
            log.info(
                "run %s: %s problems, %s, %s",
                config.run.name,
                len(problems),
                store_path(config) or "memory",
                server.address,
            )
            with stopping():
                await server.serve(desk)


def store_path(config: Config) -> Path | None:
    """The ledger's file; None: in memory."""
    return config.buffer.path and config.run.path / config.buffer.path


def restored(config: Config, store: Store, problems: int) -> Ledger:
    """The ledger as the store has it."""
    batch = config.batch
    ledger = Ledger(
        problems,
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
    )
    ledger.restore(store.load(), time.monotonic())
    return ledger


def rules(config: Config) -> Limits:
    """What the answers depend on."""
    return Limits(
        run=config.run.name,
        fingerprint=load.fingerprint(config),
        samples=config.batch.samples,
        max_bytes=int(config.buffer.max_gib * 2**30),
        max_message=config.buffer.max_message_mib * 2**20,
        keep=config.buffer.keep,
    )


@contextmanager
def stopping() -> Iterator[None]:
    """The first signal ends the block, without an error; the second ends the process."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(128 + number)
        log.info("stopping (%s again to force quit)", signal.Signals(number).name)
        assert task
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    except asyncio.CancelledError:
        if not signals:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
