"""`python -m buffer CONFIG` runs the buffer of a run.

The first SIGINT or SIGTERM stops it cleanly (exit 0: all that was received is committed and answered), the second at
once. Exit 2: bad input, found before the start. Exit 1: the file failed while it served.
"""

import asyncio
import logging
import signal
import sqlite3
import sys
from collections.abc import Sequence
from functools import partial

import uvloop

from buffer import inspect, scrub
from buffer.curve import buffer_keys
from buffer.keys import KeysError, make_keys
from buffer.ledger.counts import Marks
from buffer.ledger.difficulty import Shares
from buffer.ledger.rules import Ledger
from buffer.ledger.types import LedgerError
from buffer.problems import Problems, check_images, load_problems
from buffer.resources import collect_rarely, keep_memory, raise_open_files
from buffer.store.failures import remedy
from buffer.store.faults import DamagedPage, StoreGone
from buffer.store.opening import is_damage
from buffer.store.past import accept_loss, losses, past, store_path
from buffer.store.sqlite import Store
from buffer.wire.handlers import Handlers
from buffer.wire.limits import Limits
from buffer.wire.requests import PendingRequests
from buffer.wire.router import ListenError
from buffer.wire.server import BufferServer, ListeningClock
from buffer.wire.values import Bounds
from configs import load, resume
from configs.checks import check, existing
from configs.data.sources import needs_truth
from configs.entrypoint import (
    BAD_INPUT,
    DONE,
    FAILED,
    StopSignals,
    code_of,
    configure_logging,
    run_and_exit,
    split_flags,
)
from configs.plain_text import print_visible
from configs.schema import Config

log = logging.getLogger("buffer")
PROG = "python -m buffer"
MISSED = 5
"""Heartbeats a server may miss before its leases end."""
REMEDY = "Move the run's folder to a sound disk, and start the buffer again."


def main(argv: Sequence[str]) -> int:
    configure_logging()
    command = argv[0] if argv else ""
    if command in inspect.COMMANDS:
        return inspect.main(argv)
    if command == "scrub":
        return scrub.main(argv[1:])
    if command == "stats":
        print_visible(f"{PROG} stats: there is no such command; `python -m actors status RUN` answers it", sys.stderr)
        return BAD_INPUT
    if command == "keys":
        return print_keys(load.read(argv[1:], f"{PROG} keys"))
    if command in ("-h", "--help"):
        commands = inspect.COMMANDS | {"scrub": scrub.WHAT, "keys": "make the run's keys"}
        commands |= {"stats": "`python -m actors status RUN`"}
        print_visible(f"usage: {PROG} CONFIG, or {PROG} COMMAND ... RUN; COMMAND --help says more")
        print_visible("\n".join(f"  {name:<10} {what}" for name, what in commands.items()), end="\n\n")
    flags, argv = split_flags(argv, PROG, accept_loss={"action": "store_true"})
    config = load.read(
        argv, f"{PROG} [--accept-loss]", partial(check, files=("data.train", "data.image_dir", "run.folder"))
    )
    try:
        uvloop.run(run(config, flags.accept_loss))
    except (ListenError, KeysError, LedgerError, load.ConfigError) as error:
        print_visible(f"{PROG}: {error}", sys.stderr)
        return code_of(error)
    except (sqlite3.Error, OSError) as error:
        problem = f"{store_path(config)}: {error}; nothing unsaved was acknowledged"
        print_visible(f"{PROG}: {problem}{advice_for(error)}", sys.stderr)
        return FAILED
    return DONE


def print_keys(config: Config) -> int:
    """Make the keys of a run unless they are there, and print their folder; returns the exit code."""
    try:
        print_visible(make_keys(config.run.path / "keys"))
    except KeysError as error:
        print_visible(f"{PROG} keys: {error}", sys.stderr)
        return code_of(error)
    return DONE


async def run(config: Config, loss_accepted: bool = False) -> None:
    raise_open_files(config)
    keep_memory()
    keys = buffer_keys(config.buffer.address, config.run.path)
    limits, clock = limits_of(config), ListeningClock()
    async with BufferServer(config.buffer.address, limits.max_message, keys, clock) as server:
        room, truth, path = existing(config.run.path), needs_truth(config), store_path(config)
        index = path and path.with_name(f"{path.name}-rows")
        problems = load_problems(config.data.train, config.data, room, truth=truth, index=index)
        check_images(config, problems)
        if lost := losses(config):
            if not loss_accepted:
                raise load.ConfigError(lost)
            log.warning("accepted: %s", "; ".join(lost))
        if loss_accepted:
            accept_loss(config)
        changed = resume.changes(past(config).settings, config)
        with Store(path, config.buffer.fsync, problems, problems.digest, problems.place) as store:
            store.record_settings(resume.settings(config), changed)
            load.write(config, config.run.path / "config.yaml")
            for change in changed:
                log.info("changed since the last launch: %s", change)
            handlers = Handlers(restored(config, store, problems, clock), store, problems, limits)
            if any(change.key == "rollout.servers" for change in changed):
                handlers.ledger.wanted.scale(None, by_person=True)  # the run file is newer
            problems.listen(server.wake)
            log.info("run %s: %s problems, %s, %s", limits.run, len(problems), path or "memory", server.address)
            if handlers.ledger.view.finished():
                log.warning("the run is finished; to go on, raise run.versions or data.epochs and start again")
            collect_rarely()
            serving = asyncio.create_task(server.serve(PendingRequests(handlers, limits.max_message)))

            def drain(number: int) -> None:
                log.info("stopping (%s again to force quit)", signal.Signals(number).name)
                serving.cancel()

            with StopSignals(drain, last=True):  # the learner still needs it for its last version
                await asyncio.wait({serving})
            if not serving.cancelled():
                serving.result()


def advice_for(error: sqlite3.Error | OSError) -> str:
    if isinstance(error, StoreGone | DamagedPage):
        return ""  # its own text says what to do
    if is_damage(error):
        damage = "The file is damaged: `python -m buffer scrub RUN` names what is"
        return f". {damage}; bring back a copy of it, or begin anew with another run.name."
    cause = remedy(error)
    return f". To go on, {cause}, and start the buffer again." if cause else f". {REMEDY}"


def restored(config: Config, store: Store, problems: Problems, clock: ListeningClock) -> Ledger:
    """Leases stay valid and are renewed now: the time of reading is no part of them."""
    clock.mark()
    batch, given = config.batch, config.data.difficulty
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
        difficulty=Shares(given.shares, given.rest, given.return_after) if given else None,
        marks=Marks(given.solved_at, given.groups) if given else None,
        eval_every=config.eval.every if config.data.eval else None,
        place=problems.place,
        recall=store.closed,
    )
    ledger.restore(store.load(), clock.now())
    ledger.upcoming(1)  # draws the epoch's order before the first server asks
    return ledger


def limits_of(config: Config) -> Limits:
    return Limits(
        run=config.run.name,
        fingerprint=resume.fingerprint(config),
        samples=config.batch.samples,
        max_bytes=int(config.buffer.max_gib * 2**30),
        max_message=config.buffer.max_message_mib * 2**20,
        keep=config.buffer.keep,
        bounds=bounds_of(config),
    )


def bounds_of(config: Config) -> Bounds:
    teacher = config.teacher
    return Bounds.of_model(config.model, config.rollout.routing_replay, teacher.teachers, teacher.top_k)


if __name__ == "__main__":
    run_and_exit(main, log)
