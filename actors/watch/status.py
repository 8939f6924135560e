"""`python -m actors status RUN|CONFIG.yaml`: who waits for whom, and what became of the run's problems, on one screen.

Waits 3 s for the buffer; without an answer it shows what the files hold.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from rich.console import Console
from rich.table import Table

from actors.watch.figures import seconds_since, without_effect
from actors.watch.metrics_log import Records, evaluation_lines
from actors.watch.run_state import (
    LIMITS,
    all_absent,
    ask,
    ending,
    find_run,
    fullness,
    last_life,
    ledger_lines,
    servers_lines,
    silent,
    stored,
    waits,
    when,
)
from actors.watch.tuning import advice, go_on, is_tuned, tuner
from buffer.store.faults import StoreError
from buffer.store.lock import holder
from buffer.store.past import history
from buffer.store.sqlite import reading
from buffer.wire.protocol import State
from configs.certificate import FILE as CERTIFICATE
from configs.certificate import read as read_certificate
from configs.entrypoint import DONE, FAILED
from configs.flow.alerts import alerts
from configs.plain_text import output, visible_line, visible_lines
from configs.schema import Config

REWARD_S = 2.0
SHOWN = (
    "reward/mean",
    "teacher/reverse_kl",
    "length/mean",
    "tokens_per_s",
    "age/mean",
    "age/max",
    "time/wait_s",
    "time/version_s",
)
IN_WORDS = {*LIMITS, "running", "places", "places_taken"}
"""`fullness` puts these into words."""


def main(argv: Sequence[str]) -> int:
    config, run = find_run(argv, "python -m actors status")
    console = Console(file=output(), highlight=False, markup=False, soft_wrap=True)

    def show(*lines: str, style: str = "") -> None:
        console.print(*map(visible_lines, lines), sep="\n", style=style)

    if is_tuned(config):
        return _tuned(config, run, show)
    answer, held, trouble = asyncio.run(ask(config)), None, ""
    if config.buffer.path:
        try:
            held = stored(run / config.buffer.path)
            with closing(reading(run / config.buffer.path)) as db:
                for version, change in history(db):
                    show(f"changed at version {version}: {change}")
        except StoreError as error:
            trouble = str(error)
    ended = "" if answer else ending(config, run, held)
    show(*_folder_lines(config, run, ended))
    if answer is not None:
        show(answer.ended or f"buffer at {config.buffer.address}")
    elif not ended:
        since = last_life(config, run)
        dead = f"dead since {when(since)}" if since else "never started"
        show(f"{dead}: the buffer at {config.buffer.address} does not answer", style="red")
        show(_launcher_line(run), "The run's files hold:", style="red")
    if answer is None and trouble:
        show(trouble)
    if answer and held:
        for name, server in held.servers.items():  # the buffer's answer has no lease times
            answer.servers.get(name, {}).get("stats", {}).update(server["stats"])
    if answer and answer.evaluation:
        show(answer.evaluation)
    for line in servers_lines(answer, config) if answer else ():
        show(line)
    if state := answer or held:
        show(*ledger_lines(state))
        if state.servers and answer is None:
            show("servers with leases when the buffer was last alive; whether they run is not known:")
        if state.servers:
            console.print(_servers_table(state, config), soft_wrap=False)
    if ended:
        return DONE
    for number, url in enumerate(config.reward.urls):
        show(f"reward server reward-{number} at {url}: {'answers' if is_well(url) else 'does not answer'}")
    show(*teacher_lines(config))
    if answer is None:
        show(*_last_log_lines(run))
        return FAILED
    absent = all_absent(answer, config)
    nobody = f"nobody: {absent}" if absent else "nobody, all are working"
    show(*(f"waits: {line}" for line in waits(answer, config) or [nobody]))
    return DONE


def _tuned(config: Config, run: Path, show: Callable[..., None]) -> int:
    ended, process = ending(config, run, None), tuner(config, run)
    show(*_folder_lines(config, run, ended))
    if process and not ended:
        show(f"process {process} trains it", advice(Records(run / "metrics.jsonl", looks=False)))
    elif not ended:
        show(go_on(config), style="red")
    return DONE if process or ended else FAILED


def teacher_lines(config: Config) -> Iterator[str]:
    """Whether the run's own teacher servers answer, a line each."""
    teacher = config.teacher
    for number, source in enumerate(teacher.served):
        url, name = f"http://{teacher.host}:{teacher.port + number}", teacher.teachers[source].model
        rows, answer = f" for rows of {source}" if source else "", "answers" if is_well(url) else "does not answer"
        yield f"teacher server teacher-{number} ({name}{rows}) at {url}: {answer}"


def is_well(url: str) -> bool:
    """Whether a reward or teacher server answers within REWARD_S that it is well."""
    try:
        with build_opener(ProxyHandler({})).open(f"{url}/health", timeout=REWARD_S) as response:  # without a proxy
            return bool(response.status == 200)
    except OSError:  # also what urllib raises for a status
        return False


def _folder_lines(config: Config, run: Path, ended: str) -> Iterator[str]:
    log = Records(run / "metrics.jsonl", looks=False)
    records = log.ordered()
    done = records[-1]["version"] if records else 0
    yield f"run {config.run.name} in {run}: version {done} of {config.run.versions}" + (f", {ended}" if ended else "")
    for version, record in sorted(log.evaluations.items())[-1:]:
        yield from (f"version {version} evaluated on {line}" for line in evaluation_lines(record))
    if records:
        seconds = seconds_since(log, time.time()) or 0.0
        shown = {*SHOWN, *(("loss", "epoch") if is_tuned(config) else ())}
        figures = [f"{key} {value:.4g}" for key, value in records[-1].items() if key in shown]
        yield f"last record {seconds:.0f} s ago: {', '.join(figures)}"
        yield from without_effect(log)
        yield from (f"alert: {line}" for line in alerts(records[-1], records[:-1]))
    checkpoints = sorted(path.name for path in (run / "checkpoints").glob("v*"))
    yield f"checkpoints: {', '.join(checkpoints) or 'none'}"
    if certificate := read_certificate(run / CERTIFICATE):
        yield from certificate.lines()


def _launcher_line(run: Path) -> str:
    if process := holder(run / "launch.lock"):
        return f"Its launcher, process {process}, runs: it starts the buffer again, or ends."
    again = f"python -m actors launch {run / 'config.yaml'}"
    return f"No launcher of this machine runs it, so nothing starts it again. Go on with: {again}"


def _last_log_lines(run: Path) -> Iterator[str]:
    for log in sorted((run / "logs").glob("*.log")):
        lines = log.read_bytes()[-4096:].decode(errors="replace").splitlines()
        yield f"{log.name}, {time.time() - log.stat().st_mtime:.0f} s ago: {lines[-1] if lines else 'empty'}"


def _servers_table(state: State, config: Config) -> Table:
    columns = ("server", "version", "leases", "last message", "sequences", "figures")
    table = Table(*columns, box=None, header_style="bold")
    gone = silent(state, config)
    for name, server in state.servers.items():
        shown = {key: value for key, value in server.get("stats", {}).items() if key not in IN_WORDS}
        if name in gone:
            shown = {}
        stats = "  ".join(f"{key} {value:.4g}" for key, value in shown.items())
        silent_s = server.get("silent_s")
        version = server.get("version")
        silence = "has not asked for work yet" if version is None else "leases ended"  # vLLM starts without heartbeats
        silence = f"it ended {server['gone_s']:.0f} s ago" if "gone_s" in server else silence
        heard = "?" if silent_s is None else f"{silent_s:.1f} s ago" + f" ({silence})" * (name in gone)
        full = "" if name in gone else fullness(state, name)
        shown_version = "?" if version is None else str(version)
        cells = (name, shown_version, str(server.get("leases", "?")), heard, full, stats)
        table.add_row(*map(visible_line, cells))
    return table
