"""The page in headless Chromium, at the width of a phone and of a desk, light and dark, live and frozen: it draws, says
no error, shows the figures of metrics.jsonl, and what a model wrote stays text.

Skipped where there is no Chromium (`make browser` brings Debian's); HEADRACE_BROWSER=required makes that a failure.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.report import summary
from buffer.wire.protocol import State
from tests.harness.children import children
from tests.harness.lanes import long_but
from tests.harness.watched import HOSTILE, append, evaluation, look, make_config, record, sample, state, store

pytestmark = pytest.mark.timeout(900)
SIZES = {"phone": (390, 844), "desk": (1440, 900)}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
WAIT_MS, TEST_S = 120_000, 600.0
FIRST, ALL = 20, 30
"""Versions that have records when a live page is opened, and after."""


def chromium() -> str | None:
    """The browser's program."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """After so long, kill all that this file has started: Playwright's `evaluate` and `close`, and a line that is
    waited for, have no limits of their own, and fail then."""

    def kill() -> None:
        for child in children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextmanager
def started_browser() -> Iterator[Any]:
    program = chromium()
    if program is None:
        assert os.environ.get("HEADRACE_BROWSER") != "required", "no chromium on this machine: `make browser`"
        pytest.skip("no chromium on this machine: `make browser` installs Debian's")
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=program, args=FLAGS, timeout=WAIT_MS)
        try:
            yield started
        finally:
            with suppress(Error):  # it was killed
                started.close()


@pytest.fixture
def browser() -> Iterator[Any]:
    with bounded(TEST_S), started_browser() as started:
        yield started


@contextmanager
def watching(run: Path) -> Iterator[str]:
    """`python -m actors watch` of the run; its address."""
    command = [sys.executable, "-m", "actors", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            yield server.stdout.readline().partition(": ")[2].split()[0]
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


class Tab:
    """A page in the browser, and what went wrong in it."""

    def __init__(self, browser: Any, address: str, size: str, scheme: str) -> None:
        width, height = SIZES[size]
        self.width, self.wrong = width, list[str]()
        self.page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page.set_default_timeout(WAIT_MS)
        self.page.on(
            "console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.goto(address)
        self.wait("body[data-ready]")

    def _hear(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.wrong.append(said.text)

    def wait(self, selector: str) -> None:
        """Until there is such an element."""
        self.page.wait_for_selector(selector, state="attached")

    def figures(self) -> dict[str, str]:
        """The headline figures, by name."""
        names, values = (self.page.locator(f"#figures {tag}").all_inner_texts() for tag in ("dt", "dd"))
        return dict(zip(names, values, strict=True))

    def text(self, selector: str) -> str:
        found: str = self.page.inner_text(selector)
        return found

    def check(self, versions: int) -> None:
        """What holds of every page of the run."""
        page = self.page
        assert self.wrong == [], "nothing on the console"
        assert page.evaluate("document.documentElement.scrollWidth") <= self.width, "nothing sticks out"
        assert page.evaluate("window.broken") is None, "what a model wrote is no program"
        assert page.evaluate("D.version.length") == versions
        assert page.locator("canvas").count() == page.evaluate("drawn.length") >= 16
        boxes = page.eval_on_selector_all("canvas", "all => all.map(one => one.getBoundingClientRect().right)")
        assert max(boxes) <= self.width
        background, text = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert background != text


def written(run: Path, versions: int) -> dict[str, float]:
    """The record of the last of `versions` in the run's file."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, float] = next(one for one in records if one.get("version") == versions and "reward/mean" in one)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with everything that a page may show."""
    config = make_config(tmp_path)
    for version in range(1, FIRST + 1):
        append(config.run.path, record(version), look(15.0 * version, version))
    append(config.run.path, evaluation(0, 0.25), evaluation(10, 0.5))
    store(config.run.path, sample(HOSTILE))
    return config.run.path


def drawn_figures(tab: Tab, run: Path, versions: int) -> None:
    """The page's columns and headline are those of the file."""
    last = written(run, versions)
    for key in ("reward/mean", "length/mean", "entropy/mean", "offpolicy/k3", "time/wait_s"):
        assert tab.page.evaluate(f"D.columns['{key}'].at(-1)") == pytest.approx(last[key], rel=1e-5)
    seen = tab.figures()
    assert seen["version"] == f"{versions} / 40" and seen["learner waits"] == "62 %"
    assert seen["age, mean"] == f"{last['age/mean']:.1f}" and seen["tokens/s"] == "500"
    assert f"length/mean {last['length/mean']:.2f}" in tab.text("main")


@pytest.mark.parametrize(
    ("size", "scheme"), long_but([("phone", "dark"), ("desk", "light"), ("phone", "light"), ("desk", "dark")], 0)
)
def test_the_frozen_page(browser: Any, run: Path, size: str, scheme: str) -> None:
    assert summary.main([str(run)]) == 0
    tab = Tab(browser, f"file://{run}/report.html", size, scheme)
    tab.check(FIRST)
    drawn_figures(tab, run, FIRST)
    assert HOSTILE in tab.text("#samples") and "0.500" in tab.text("#evaluations")
    dark = tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
    assert dark == (scheme == "dark")
    tab.page.click("#theme")
    assert (tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)") != dark
    tab.page.select_option("#axis", "hours")
    tab.page.fill("#find", "length/")
    assert tab.page.locator("#rest .card").count() == 3
    tab.check(FIRST)
    tab.page.close()


@pytest.mark.parametrize(("size", "scheme"), long_but([("phone", "dark"), ("desk", "light")], 1))
def test_the_live_page(
    browser: Any, run: Path, serve: Callable[[State], str], tmp_path: Path, size: str, scheme: str
) -> None:
    make_config(tmp_path, f"buffer.address={serve(state())}")
    with watching(run) as address:
        tab = Tab(browser, address, size, scheme)
        tab.wait("#status:text-is('running')")
        tab.check(FIRST)
        drawn_figures(tab, run, FIRST)
        assert "one more server would" in tab.text(".advice") or "two more servers would" in tab.text(".advice")
        assert "rollout-1 is lost" in tab.text("#says") and "batch 7 has 20 of 32 groups" in tab.text("#waits")
        assert "80 %" in tab.text("#servers") and "KeyError" in tab.text("#failures")
        box = "document.querySelector('#waits .card')"
        assert tab.page.evaluate(f"{box}.scrollWidth <= {box}.clientWidth"), "nobody has to scroll for the reason"
        tab.wait("#samples .card")
        assert HOSTILE in tab.text("#samples")
        append(run, *(record(version) for version in range(FIRST + 1, ALL + 1)), evaluation(20, 0.75), look(999.0, ALL))
        tab.wait(f"body[data-seen='{ALL}']:has(#figures dd:text-is('{ALL} / 40'))")
        tab.wait("#evaluations td:text-is('0.750')")
        tab.check(ALL)
        drawn_figures(tab, run, ALL)
        kept = [json.dumps(record(version)) + "\n" for version in range(1, 11)]  # the learner restores version 10
        (run / "new").write_text("".join(kept))
        (run / "new").replace(run / "metrics.jsonl")
        tab.wait("body[data-seen='10']:has(#figures dd:text-is('10 / 40'))")
        assert tab.wrong == []
        tab.page.close()


TAKE = """([begin, end]) => {
  const records = [], looks = [];
  for (let v = begin; v < end; v++) {
    records.push({ version: v, "reward/mean": v, "time/version_s": 3600 });
    looks.push({ time: 1e6 + v, "servers/running": 1 });
  }
  take({ records, looks, evaluations: [], overview: D.overview, batches: [] });
}"""


def test_a_page_that_is_open_for_days_thins_its_older_points(browser: Any, run: Path) -> None:
    assert summary.main([str(run)]) == 0
    tab = Tab(browser, f"file://{run}/report.html", "desk", "light")
    for begin in (FIRST + 1, 3001, 6001, 9001):
        tab.page.evaluate(TAKE, [begin, begin // 3000 * 3000 + 3001])
    versions = tab.page.evaluate("D.version")
    assert len(versions) <= 4000 and versions[:20] == list(range(1, 21)), "the first"
    assert versions[-2000:] == list(range(10001, 12001)) and versions == sorted(set(versions)), "the last, in order"
    assert tab.page.evaluate("Object.values(D.columns).every(one => one.length === D.version.length)")
    assert tab.page.evaluate("D.columns['reward/mean'].at(3000) === D.version.at(3000)")
    hours = tab.page.evaluate("column('hours').at(-1)")
    assert hours == pytest.approx(12000 - FIRST, rel=0.01), "also of the versions that it left out"
    assert tab.page.evaluate("D.looks.length") <= 1500 and tab.page.evaluate("D.looks.at(-1).time") == 1e6 + 12000
    assert tab.wrong == []
    tab.page.close()


def test_a_run_that_has_not_begun(browser: Any, tmp_path: Path) -> None:
    run = make_config(tmp_path).run.path
    with watching(run) as address:
        tab = Tab(browser, address, "desk", "light")
        assert tab.wrong == [] and "No version is trained yet" in tab.text(".advice")
        assert "never been started" in tab.text("#told") and tab.page.locator("canvas").count() == 0
        append(run, record(1), record(2))
        tab.wait("body[data-seen='2'] canvas")
        assert tab.wrong == []
        tab.page.close()


def test_a_page_that_hangs_is_a_failure(run: Path) -> None:
    assert summary.main([str(run)]) == 0
    with bounded(TEST_S), started_browser() as browser:
        tab = Tab(browser, f"file://{run}/report.html", "desk", "light")
        with bounded(0.5), pytest.raises(Exception, match="closed"):
            tab.page.evaluate("new Promise(() => {})")


DRAWN = """([title, key, before]) => {  // pixels of the curve `key` halfway between two neighbouring points
  const chart = drawn.find(one => one.t === title), u = chart.u;
  const s = chart.series.findIndex(one => one[0] === key) + 1, scale = u.series[s].scale;
  const at = i => [u.valToPos(u.data[0][i], "x", true), u.valToPos(u.data[s][i], scale, true)];
  const [a, b] = [at(before), at(before + 1)], [x, y] = [0, 1].map(i => Math.round((a[i] + b[i]) / 2));
  const colour = paint(tint(chart.series[s - 1][1])).match(/[0-9]+/g).map(Number);
  const image = u.ctx.getImageData(x, y - 3, 1, 7).data;
  const near = i => [0, 1, 2].every(n => Math.abs(image[i + n] - colour[n]) < 20) && image[i + 3] > 100;
  return [0, 4, 8, 12, 16, 20, 24].filter(near).length;
}"""


def test_lines_break_where_there_are_no_data_and_the_page_says_why(browser: Any, tmp_path: Path) -> None:
    """Versions 3, 8, 13 and 18 trained no token of age 0; versions 11 to 20 are of a second launch, an hour later."""
    run = make_config(tmp_path).run.path
    for version in range(1, FIRST + 1):
        at = 1e9 + 10.0 * version + 3600.0 * (version > 10)
        one = record(version, time=at, **{"offpolicy/k3_age_1": 2e-3, "mismatch/k3_fresh": 1e-4 * version})
        if version % 5 == 3:
            del one["mismatch/k3_fresh"]
        append(run, one, look(at, version))
    store(run)
    with sqlite3.connect(run / "buffer.sqlite") as db:
        db.execute("UPDATE items SET bytes = 0 WHERE batch = 0")
        db.execute("DELETE FROM samples WHERE item IN (SELECT item FROM items WHERE batch = 0)")
    db.close()
    assert summary.main([str(run)]) == 0
    tab = Tab(browser, f"file://{run}/report.html", "desk", "light")
    tab.check(FIRST)

    def between(title: str, key: str, before: int) -> bool:
        return bool(tab.page.evaluate(DRAWN, [title, key, before]) > 0)

    mismatch = "mismatch and off-policy, nat"
    assert between("reward", "~reward/mean", 8) and not between("reward", "~reward/mean", 9), "launched again"
    assert between("sequences", "servers/running", 8) and not between("sequences", "servers/running", 9)
    assert between(mismatch, "youngest k3", 0) or between(mismatch, "mismatch/k3_fresh", 0)
    assert not tab.page.evaluate("column('mismatch/k3_fresh').some((v, i) => v != null && D.version[i] % 5 === 3)")
    assert tab.page.evaluate("column('youngest k3')[2]") == 2e-3, "a version without fresh tokens"
    seen = tab.text("main")
    assert "mismatch/k3_fresh is missing in 4 of 20 versions: it is measured on tokens that the trained policy" in seen
    assert "Not drawn: evaluation: data.eval names no problems." in seen
    assert "Batch 39, the only one whose samples are stored" in seen
    assert "the samples of batches 0 to 38 were removed with older checkpoints; buffer.keep: all keeps them" in seen
    tab.page.close()


def ticks(tab: Tab, title: str, axis: int = 0) -> list[str]:
    """The labels of an axis of a chart: 0 below, 1 on the left, 2 on the right."""
    found: list[str] = tab.page.evaluate(
        "([title, axis]) => drawn.find(one => one.t === title).u.axes[axis]._values.filter(v => v)", [title, axis]
    )
    return found


def test_axes_of_a_short_run_have_whole_versions_times_and_no_share_above_one(browser: Any, tmp_path: Path) -> None:
    """Before, they had version 1.5, hour 0.004, a share cut off of 100, and no label within a decade."""
    run = make_config(tmp_path).run.path
    for version in range(1, 5):
        append(run, record(version, **{"length/truncated": 0.0, "gradient/norm": 0.4 + 0.1 * version}))
        append(run, look(1e9 + 5.0 * version, version))
    assert summary.main([str(run)]) == 0
    tab = Tab(browser, f"file://{run}/report.html", "desk", "light")
    assert ticks(tab, "reward") == ["1", "2", "3", "4"]
    assert ticks(tab, "servers")[0] == "0 s" and ticks(tab, "servers")[-1] == "15 s"
    assert ticks(tab, "answer length, tokens", 2)[-1] == "1"
    assert len(ticks(tab, "gradient norm before clipping", 1)) >= 2
    tab.page.select_option("#axis", "hours")
    tab.page.wait_for_timeout(100)
    assert ticks(tab, "reward")[-1] == "40 s", "versions of 10 s"
    assert tab.wrong == []
    tab.page.close()
