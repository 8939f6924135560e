"""The page as a file: what users and models wrote cannot become part of it, and nothing else is fetched."""

import base64
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actors.report.page import embedded, render
from actors.report.page_data import folded, page_data, short, spread
from actors.watch.metrics_log import Records, short_look
from actors.watch.overview import look_over
from configs.certificate import FILE, Certificate, judged, write
from configs.plain_text import all_visible
from tests.harness.watched import HOSTILE, append, evaluation, look, make_config, record, sample, store


def data(folder: Path, live: bool = False) -> dict[str, Any]:
    config = make_config(folder)
    run = config.run.path
    append(run, *(record(version) for version in range(1, 41)), look(1.0, 40), evaluation(0, 0.5))
    store(run, sample(HOSTILE))
    records = Records(run / "metrics.jsonl")
    return page_data(config, run, records, look_over(config, records, None, time.time(), "ended"), live)


def test_the_page_holds_all_it_needs_and_no_script_of_others(tmp_path: Path) -> None:
    html = render(data(tmp_path) | {"name": "<b>toy"})
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == 2 and html.count("</script>") == 3 and "<title>&lt;b&gt;toy" in html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"sha256-{digest}" in policy[1].replace("&#43;", "+").replace("&#39;", "'")
    assert not re.search(r"(src|href)=\"(?!data:,)", html)


@given(st.recursive(st.text() | st.floats(allow_nan=False, allow_infinity=False) | st.none(), st.lists))
def test_embedded_json_comes_back_and_ends_nothing(value: Any) -> None:
    text = embedded({"value": value})
    assert json.loads(text) == {"value": all_visible(value)} and not set("<>&") & set(text)


def test_the_page_shows_what_the_file_has(tmp_path: Path) -> None:
    found = data(tmp_path)
    assert found["version"] == list(range(1, 41)) and found["columns"]["length/mean"][9] == 40.5
    assert found["looks"][0]["server/rollout-0/kv_usage"] == 0.8 and found["looks"][0]["servers/heard"] == 2
    assert found["evaluations"] == [{"version": 0, "figures": {"aime mean@8": 0.5}}]
    assert found["samples"]["39"][0]["answer"] == HOSTILE
    assert ["run.name", "toy"] in found["settings"]
    assert data(tmp_path / "other", live=True)["samples"] == {}, "a live page asks for them"


def test_the_page_shows_the_certificate_of_the_model(tmp_path: Path) -> None:
    assert data(tmp_path / "none")["certificate"]["rows"] == []
    run = make_config(tmp_path).run.path
    run.mkdir(parents=True, exist_ok=True)
    check = judged("packed documents = alone", 3e-6, 1e-4)
    write(Certificate(model="m", kind="qwen2", checks=(check,)), run / FILE)
    found = data(tmp_path)["certificate"]
    assert found["rows"] == [["packed documents = alone", "3.0e-06 nat", "1.0e-04", "holds", ""]]
    assert found["summary"].startswith("certificate: 1 of 1 comparisons of qwen2 hold")


def test_a_page_of_a_run_without_anything(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    records = Records(config.run.path / "metrics.jsonl")
    found = page_data(config, config.run.path, records, look_over(config, records, None, 0.0), live=True)
    assert found["version"] == [] and found["position"] == "0-0" and "</html>" in render(found)


def test_figures_that_are_none_do_not_break_json() -> None:
    assert short(float("nan")) is None and short(float("inf")) is None and short([1]) is None
    assert (short(0.123456789), short(123456789.0), short(7), short("x")) == (0.123457, 123457000.0, 7, "x")


def test_long_texts_are_folded_and_many_things_are_spread() -> None:
    assert len(folded("x" * 50_000)) < 4100 and folded("short") == "short"
    assert spread(range(1000), 4) == [0, 333, 666, 999] and spread([1, 2], 4) == [1, 2]


def test_of_many_servers_only_some_have_curves() -> None:
    wide = {"time": 1.0, "servers/heard": 40} | {f"server/s{n}/running": 1.0 for n in range(40)}
    assert len(short_look(wide)) == 2 + 12
