"""`python -m actors scale RUN --servers N|auto [--no-wait]`: more or fewer rollout servers while a run goes on.

Waits until the launcher has done it, but for `--no-wait`. The number holds until the next `scale`, over restarts too;
`auto` goes back to the run file.
"""

import asyncio
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack

from actors.process import FINAL
from actors.watch.run_state import absences, find_run
from buffer.curve import is_loopback
from buffer.keys import KeysError, NoKeys, load_client_keys
from buffer.wire.connection import Connection, RefusedError
from buffer.wire.protocol import Ack, Kept, Scale, State, Status
from configs.entrypoint import BAD_INPUT, DONE, FAILED, split_flags
from configs.plain_text import print_visible
from configs.schema import Config, ServerRange

PROG = "python -m actors scale"
ANSWER_S, POLL_S, LAUNCHER_POLLS = 5.0, 0.5, 10


def main(argv: Sequence[str]) -> int:
    flags, rest = split_flags(argv, PROG, servers={"metavar": "N|auto"}, no_wait={"action": "store_true"})
    if flags.servers is None and rest[1:] and (rest[-1] == "auto" or rest[-1].isdigit()):
        print_visible(f"{rest[-1]}: the number of servers has a flag; write --servers={rest[-1]}", sys.stderr)
        return BAD_INPUT
    config, run = find_run(rest, f"{PROG} --servers N|auto [--no-wait]")
    words = str(flags.servers)
    if words != "auto" and not (words.isdigit() and int(words) >= 1):
        problem = "missing" if flags.servers is None else f"{words} is not a whole number >= 1 or auto"
        print_visible(
            f"--servers: {problem}; write --servers=4, or --servers=auto for what the run file says", sys.stderr
        )
        return BAD_INPUT
    try:
        return asyncio.run(scale(config, None if words == "auto" else int(words), waits=not flags.no_wait))
    except RefusedError as error:
        print_visible(f"--servers: {error.reason}", sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print_visible(
            f"this command waits no longer; the servers stay wanted: see `python -m actors status {run}`", sys.stderr
        )
        return 128 + signal.SIGINT
    except (TimeoutError, KeysError) as error:
        silence = f"the buffer at {config.buffer.address} does not answer: is the run launched?"
        silence += f" See `python -m actors status {run}`"
        never_started = isinstance(error, NoKeys) and is_loopback(config.buffer.address)
        print_visible(error if isinstance(error, KeysError) and not never_started else silence, sys.stderr)
        return FAILED


async def scale(config: Config, servers: int | None, waits: bool) -> int:
    """`servers` None: as the run file says. Raises RefusedError, TimeoutError, KeysError."""
    keys = load_client_keys(config.run.path / "keys", "launcher")
    async with AsyncExitStack() as stack:
        async with asyncio.timeout(ANSWER_S):
            connection = Connection(config.buffer.address, "scale", "launcher", keys=keys)
            await stack.enter_async_context(connection)
        if (kept := await launchers_word(connection)) is None:
            print_visible("no launcher keeps this run's servers: start and stop them by hand", sys.stderr)
            return FAILED
        async with asyncio.timeout(ANSWER_S):
            await connection.expect(Scale(servers=servers), Ack)
        print_visible("\n".join(prospect(config, kept, servers)))
        broken = [name for name, life in kept.servers.items() if life in FINAL]
        return await arrival(config, connection, servers, broken) if waits and servers else DONE


async def launchers_word(connection: Connection) -> Kept | None:
    """None without a launcher. Raises TimeoutError."""
    for _ in range(LAUNCHER_POLLS):
        async with asyncio.timeout(ANSWER_S):
            state = await connection.expect(Status(), State)
        if state.kept is not None and state.launcher_gone_s is None:
            return state.kept
        await asyncio.sleep(POLL_S)
    return None


def prospect(config: Config, kept: Kept, servers: int | None) -> list[str]:
    """What will happen, in lines: from how many to how many, which are drained; or that nothing changes."""
    own = config.rollout.servers
    if servers is None and isinstance(own, ServerRange):
        rule = f"the rule decides from here, between {own.min} and {own.max} (rollout.servers)"
        return [f"servers: {kept.wanted} stay for now; {rule}"]
    if servers is None:
        assert isinstance(own, int)
        return [f"the number of servers is the run file's again: {own}", *prospect(config, kept, own)]
    leaving = [name for name, life in kept.servers.items() if life == "draining"]
    staying = [name for name in kept.servers if name not in leaving]
    staying.sort(key=lambda name: kept.servers[name] in FINAL)  # drained first
    broken = ", ".join(name for name in staying[:servers] if kept.servers[name] in FINAL)
    notes = [f"{broken} could not be kept before: scale down and up again to try anew"] * bool(broken)
    notes += [f"drained already: {', '.join(leaving)}"] * bool(leaving)
    if servers == len(staying):
        shown = [f"{name} ({life})" if (life := kept.servers[name]) == "placing" else name for name in staying]
        return [f"nothing changes: {servers} servers are kept already: {', '.join(shown)}", *notes]
    if servers < len(staying):
        bound = f"their groups are finished within {config.rollout.drain_s:g} s, or made by the others"
        return [f"servers: {len(staying)} -> {servers}; drained: {', '.join(staying[servers:])}; {bound}", *notes]
    new = f"{servers - len(staying)} to be placed; vLLM starts in a minute or two, then they generate"
    return [f"servers: {len(staying)} -> {servers}; {new}", *notes]


async def arrival(config: Config, connection: Connection, servers: int, broken: Collection[str] = ()) -> int:
    """Wait until the servers are as wanted, except `broken` ones. FAILED too once another number is wanted."""
    told: dict[str, str] = {}
    while True:
        state = await connection.expect(Status(), State)
        if (state.wanted_servers, state.wanted_by_person) != (servers, True):
            by = "by another `scale`" if state.wanted_by_person else "as the run file says"
            print_visible(f"{state.wanted_servers} servers are wanted now, {by}, and no longer {servers}")
            return FAILED
        now = lives(state, config)
        for name, life in {**dict.fromkeys(told.keys() - now.keys(), "has left"), **now}.items():
            if told.get(name) != life and state.kept:
                print_visible(f"{name} {life.replace('_', ' ')}")
        told = now if state.kept else told
        others = {name: life for name, life in told.items() if name not in broken}
        if failed := [name for name, life in others.items() if life in FINAL]:
            print_visible(f"{', '.join(failed)} could not be kept: see logs/; scale down and up again to try anew")
            return FAILED
        if state.kept and state.kept.wanted == servers == len(told) and {*others.values()} <= {"generates"}:
            return DONE
        await asyncio.sleep(POLL_S)


def lives(state: State, config: Config) -> dict[str, str]:
    """A server that works `generates`."""
    found = dict[str, str](state.kept.servers if state.kept else {})
    present = state.servers.keys() - absences(state, config).keys()
    for name, life in found.items():
        if life == "started" and name in present:
            found[name] = "generates"
    return found
