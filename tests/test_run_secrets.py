"""A credential from an environment variable is in no file of a run, and in nothing that is shown of it.

Fills a run's folder by the code that writes it: config file, ledger with a failure, logs of a kept process and of a
worker, traceback, report. Then reads every byte.
"""

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from actors.process import Event, Process
from actors.report import summary
from actors.report.page_data import page_data
from actors.supervise.keeper import Keeper
from actors.watch.metrics_log import Records
from actors.watch.overview import look_over
from actors.watch.status import main as status
from buffer.store.sqlite import Store
from configs.entrypoint import configure_logging
from configs.explain import explain
from configs.origins import disclosed
from configs.plain_text import visible
from configs.resume import changes, settings
from rollout.cage import CagedError, CagedFunction
from rollout.cage.cage import Cage
from tests.harness.watched import append, make_config, record, state

SECRET = '4f9d-"very"-secret-77'
SHOWN = "${oc.env:RUN_SECRETS_KEY}"
USED = """
def load(key):
    def leak(answer):
        print("printed", key, "\\x1b[2J\\rnext line", flush=True)
        raise ValueError(f"the key {key} is refused by https://me:{key}@host/v1")
    return leak
"""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUN_SECRETS_KEY", SECRET)
    (tmp_path / "leaking_reward.py").write_text(USED)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_no_file_of_a_run_and_nothing_that_is_shown_has_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = f'{{api_key: "{SHOWN}", url: "https://me:{SHOWN}@host"}}'
    config = make_config(
        tmp_path / "runs", f"reward.kwargs={given}", 'rollout.engine={hf_token: "${oc.env:RUN_SECRETS_KEY}"}'
    )
    run = config.run.path
    assert config.reward.kwargs["api_key"] == SECRET
    with Store(run / "buffer.sqlite") as store:
        older = settings(config) | {"rollout.engine": {}}
        store.record_settings(settings(config), changes(older, config))
    append(run, record(1))
    asyncio.run(leak_in_a_worker(run))
    print_in_a_kept_process(run)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure_logging()
    try:
        raise ValueError(f"vLLM was given {config.rollout.engine}")
    except ValueError:
        logging.getLogger("rollout").exception("failed with %s", config.reward.kwargs)
    records = Records(run / "metrics.jsonl")
    failed = state(failed={f"reward: ValueError: {SECRET}": 3})
    page = str(page_data(config, run, records, look_over(config, records, failed, 2e9, answers=True), live=True))
    assert summary.main([str(run)]) == 0 and status([str(run), "--buffer.address=tcp://127.0.0.1:9"]) == 1
    print(*map(visible, explain(config, 10, None)))
    output = capfd.readouterr()
    shown = {"page": visible(page), "trackers": str(disclosed(config)), "stdout": output.out, "stderr": output.err}
    assert (
        "${oc.env:RUN_SECRETS_KEY}" in output.err and "Traceback" in output.err and "changed at version" in output.out
    )
    files = {str(file): file.read_bytes().decode(errors="replace") for file in run.rglob("*") if file.is_file()}
    assert {Path(file).name for file in files} >= {
        "config.yaml",
        "buffer.sqlite",
        "report.html",
        "kept.log",
        "work-0.log",
    }
    leaks = [name for name, text in {**files, **shown}.items() if "very" in text and "secret-77" in text]
    assert leaks == []


async def leak_in_a_worker(run: Path) -> None:
    """A reward function that prints the key and raises it; its failure is logged as rollout servers log it."""
    function = CagedFunction("leak", "leaking_reward:load", [SECRET], 60.0, log=str(run / "logs" / "work"))
    async with Cage(function) as pool:
        with pytest.raises(CagedError) as caught:
            await pool.call("answer")
    logging.getLogger("rollout").warning("%s", visible(str(caught.value)))
    assert f"printed {SHOWN} \\u001b[2J\nnext line\n" in (run / "logs" / "work-0.log").read_text()


def print_in_a_kept_process(run: Path) -> None:
    """As vLLM does, which prints its arguments."""
    code = f"print('engine args: ' + repr({{'hf_token': {SECRET!r}}}))"
    keeper = Keeper(Process("kept", "rollout", (sys.executable, "-c", code), run / "logs" / "kept.log"))
    events, after = list[Event](), 0
    while not (events and events[-1].kind == "ended"):
        events += keeper.events(after, 30.0)
        after = events[-1].number
    assert any(SHOWN in event.text for event in events)
