"""`python -m actors launch RUN.yaml [MORE.yaml ...] [--section.key=value ...]`: a whole run, from check to report.

Checks everything first and explains the run; nothing is written before the run is accepted. Then it places a keeper for
each process and waits for their events. The run ends when the learner does.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from actors.doctor.run_file import check_here
from actors.process import JUDGES, Process, Role
from actors.supervise import accept
from actors.supervise.cluster.addresses import on_cluster
from actors.supervise.cluster.arrival import handed_over
from actors.supervise.fleet import Fleet
from actors.supervise.one_machine import OneMachine
from actors.supervise.placement import Placement
from actors.supervise.ray_cluster import ray_cluster
from actors.supervise.supervisor import Supervisor
from actors.watch.display import Display
from actors.watch.state_poll import StatePoll
from buffer.keys import KeysError, make_keys, require_keys
from buffer.ledger.types import LedgerError
from buffer.store.past import accept_loss
from buffer.wire.protocol import LAUNCHER
from configs.checks import cluster_of, own_hosts, refuse_paths, starts_ray
from configs.entrypoint import BAD_INPUT, DONE, code_of, split_flags
from configs.explain import explain
from configs.flow.kv_room import gpu_bytes
from configs.load import ConfigError, read, write
from configs.origins import variables
from configs.own_packages import command
from configs.plain_text import print_visible
from configs.schema import Config
from configs.start_phases import seconds_alive
from configs.variables import for_children, run_folder
from configs.writing import WriteError, writing

PROG = "python -m actors launch"
FLAGS_SHOWN = "[--dry-run] [--fork-from RUN[@vN]] [--accept-loss] [--no-report]"
REPORT_S = 10.0
"""For a server to give back unfinished work and end, after `rollout.drain_s`."""
ACCELERATORS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def main(argv: Sequence[str]) -> int:
    """Exit code: 0: done now or before, 1: a process cannot be kept or the run was given up, 2: bad input, 3: the data
    ended before `run.versions`, 128 + N: signal N."""
    switches = {name: {"action": "store_true"} for name in ("no_report", "accept_loss", "dry_run")}
    flags, argv = split_flags(argv, PROG, fork_from={"metavar": "RUN[@vN]"}, **switches)
    config = read(argv, f"{PROG} {FLAGS_SHOWN}")
    if flags.dry_run:
        return dry(config)
    if cluster := cluster_of(config):
        config = on_cluster(config, cluster)
    try:
        refuse_paths(config)
        held = accept.hold(config)
        news, finished = accept.judge(config, flags.accept_loss)
        source = accept.source(config, flags.fork_from) if flags.fork_from else None
        if finished:
            print_visible(finished)
            return DONE
        judgement = check_here(config)
        if held is None:
            with writing(config.run.path):
                run_folder(config.run.path)
            accept.hold(config)
    except (ConfigError, LedgerError, WriteError) as error:
        print_visible(error, sys.stderr)
        return code_of(error)
    logging.getLogger("buffer").setLevel(logging.ERROR)  # the display shows when the buffer does not answer
    display = Display(config)
    for line in [*explain(config, judgement.rows, gpu_bytes()), *judgement.lines(), *news]:
        display.say(line)
    if source:
        display.say(f"forked from {source}")
    display.say(f"checked in {seconds_alive():.0f} s; the processes of the run start now")
    started, wanted = accept.servers(config)
    prepared = partial(prepare, config, source, flags.accept_loss)
    code = keep(processes(config, started), display, prepared, partial(server, config), wanted)
    if code > 128 and config.buffer.path:  # a signal
        display.say(f"stopped; go on with: {PROG} {config.run.path / 'config.yaml'}")
    if not flags.no_report and code == DONE and display.records.path.exists():
        from actors.report import summary  # a launch does not wait for it

        try:
            summary.main([str(config.run.path)])
        except WriteError as error:  # the run has done its work
            print_visible(f"{PROG}: no report: {error}", sys.stderr)
    return code


def dry(config: Config) -> int:
    """Judge the run file, then try model and reward on a few problems."""
    from actors.supervise import dry_run  # slow

    try:
        print_visible("\n".join(check_here(config).lines()))
        return dry_run.main(config)
    except ConfigError as error:
        print_visible(error, sys.stderr)
        return BAD_INPUT


def prepare(config: Config, source: accept.Source | None = None, loss_accepted: bool = False) -> Path:
    """Returns the config file that every process reads."""
    if loss_accepted:
        accept_loss(config)
    require_keys(make_keys(config.run.path / "keys"))
    if source:
        accept.copy(source, config.run.path)
    file = config.run.path / "config.yaml"
    write(config, file)
    return file


def processes(config: Config, servers: int | None = None) -> list[Process]:
    learner, reward, on_cpu = config.learner, config.reward, config.rollout.device == "cpu"
    gpus = 0 if learner.device == "cpu" else learner.ranks
    return [
        _process(config, "buffer", "buffer"),
        _process(config, "learner", "learner", gpus=gpus, drain_s=learner.timeout_s),
        *(server(config, number) for number in range(config.rollout.least_servers if servers is None else servers)),
        *(
            _process(config, name, "reward", ["--name", name], 0 if on_cpu else reward.gpus)
            for name in (f"reward-{number}" for number in range(reward.servers))
        ),
        *(teacher_server(config, number) for number in range(len(config.teacher.served))),
    ]


def teacher_server(config: Config, number: int) -> Process:
    """Teacher server `number`."""
    source, name = config.teacher.served[number], f"teacher-{number}"
    gpus = 0 if config.rollout.device == "cpu" else config.teacher.teachers[source].gpus
    return replace(_process(config, name, "teacher", ["--name", name], gpus), pool=source)


def server(config: Config, number: int) -> Process:
    """Rollout server `number`."""
    rollout, name = config.rollout, f"rollout-{number}"
    gpus = 0 if rollout.device == "cpu" else rollout.tensor_parallel
    return _process(config, name, "rollout", ["--name", name], gpus, rollout.drain_s + REPORT_S)


def _process(
    config: Config, name: str, role: Role, flags: Sequence[str] = (), gpus: int = 0, drain_s: float = 30.0
) -> Process:
    file, log = str(config.run.path / "config.yaml"), config.run.path / "logs" / f"{name}.log"
    given = handed_over(os.environ, [*config.cluster.env, *variables(config)]) if cluster_of(config) else os.environ
    cleaned = for_children(given, own_hosts(config))
    env = {key: value for key, value in cleaned.items() if not key.startswith("RAY_") and key not in ACCELERATORS}
    module = ("rollout", role) if role in JUDGES else (role,)
    argv, nodes = command(*module, file, *flags), config.learner.nodes if role == "learner" else 1
    return Process(name, role, argv, log, os.getcwd(), env, gpus, nodes, drain_s)


def keep(
    processes: Sequence[Process],
    display: Display,
    prepare: Callable[[], object] = lambda: None,
    server: Callable[[int], Process] | None = None,
    servers: int = 1,
) -> int:
    """Keep `processes` until the run ends; the exit code. `prepare` is called once there is room; `server` makes
    further servers by number."""
    try:
        with display.shown(), placement(display.config, display.say) as machines:

            def fitted(process: Process) -> Process:
                return process if any(machines.gpus) else replace(process, gpus=0)  # the device `auto` means CPU then

            prepare()
            machines.pack()
            placing = [fitted(process) for process in processes], machines.place
            supervisor = Supervisor(*placing, display.show_event, display.say)
            fleet = None
            if server:
                make, each = (lambda number: fitted(server(number))), fitted(server(0)).gpus
                room = partial(machines.room, each)
                fleet = Fleet(display.config, supervisor, make, room, display.say, servers)
            return asyncio.run(_supervise(supervisor, display, machines, fleet))
    except (ConfigError, KeysError, WriteError) as error:
        print_visible(error, sys.stderr)
        return code_of(error)


@contextmanager
def placement(config: Config, say: Callable[[str], None]) -> Iterator[Placement]:
    """Raises ConfigError."""
    named = cluster_of(config)
    if named or starts_ray(config):
        say(f"connects to Ray at {named}" if named else "starts Ray on this machine, which may take half a minute")
        with ray_cluster(config) as cluster:
            yield cluster
    else:
        yield OneMachine.take(config)


async def _supervise(supervisor: Supervisor, display: Display, machines: Placement, fleet: Fleet | None) -> int:
    poll = StatePoll(display.config, LAUNCHER)
    watches = [poll.follow(), display.watch(poll), machines.watch(display.say)]
    watches += [fleet.follow(poll)] if fleet else []
    watching = list(map(asyncio.create_task, watches))
    for task in watching:
        task.add_done_callback(supervisor.notice_failure)
    try:
        return await supervisor.run()
    finally:
        for task in watching:
            task.cancel()
        display.refresh()
