"""docs/reference is what its generator writes, and each metric that a run records has a meaning there."""

import json
import re
from pathlib import Path

from benchmarks.reference_pages.__main__ import FOLDER, written
from benchmarks.reference_pages.metrics import METRICS, described
from configs.flow.alerts import ALERTS
from configs.help import keys
from learner.algorithms.diagnostics import MAXIMA, MEANS

ROOT = Path(__file__).parents[2]
RECORDED = (ROOT / "benchmarks/results/smollm2-metrics.jsonl", ROOT / "tests/actors/watch/relaunched.jsonl")
OLDER = {"weights/broadcast_s", "weights/resume_s", "weights/settle_s", "weights/stop_s"}
"""Metrics of the recorded run that no release writes any more."""


def test_the_pages_are_what_the_generator_writes() -> None:
    there = {path: path.read_text(encoding="utf-8") for path in written()}
    assert there == written(), "python -m benchmarks.reference_pages"


def test_every_key_has_a_row() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("keys-*.md"))
    assert [name for name in keys() if f"`{name}`" not in text] == []


def test_every_metric_of_recorded_runs_is_described() -> None:
    lines = [line for file in RECORDED for line in file.read_text(encoding="utf-8").splitlines()]
    recorded = {key for line in lines for key in json.loads(line)} - OLDER
    assert len(recorded) > 50
    assert sorted(key for key in recorded if described(key) is None) == []


def test_every_metric_that_has_a_rule_a_formula_or_a_curve_is_described() -> None:
    page = (ROOT / "actors/report/page.js").read_text(encoding="utf-8")
    drawn = set(re.findall(r"[\"'](\w+/[\w/-]*[a-z0-9])[\"']", page))
    assert {"ess/sequence", "time/wait_s"} <= drawn
    named = {*(key for key, *_ in ALERTS), *MEANS, *MAXIMA, *drawn}
    assert sorted(key for key in named if described(key) is None) == []


def test_a_part_of_a_name_stands_for_others_only_as_a_whole() -> None:
    for metric, name in {
        "age/share_4-7": "age/share_B",
        "age/share_undone": "age/share_B",
        "limit/masked_negative": "limit/masked_SIGN",
        "eval/aime/pass@8": "eval/SET/pass@K",
        "waiting/Take_s": "waiting/KIND_s",
        "weights/load_s": "weights/load_s",
        "weights/rollout-0/load_s": "weights/NAME/KEY",
        "buffer/version": "buffer/version",
        "servers/kv_usage": "servers/KEY",
    }.items():
        found = described(metric)
        assert found is not None and found.name == name
    assert described("age/shared") is None and described("nothing/at_all") is None


def test_no_metric_is_described_twice() -> None:
    names = [one.name for section in METRICS.values() for one in section]
    assert len(names) == len(set(names))
