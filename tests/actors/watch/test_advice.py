"""What to do about a run: one sentence for each situation, the most important first; alerts that name remedies."""

import re
from pathlib import Path

import pytest

from actors.watch.advice import Situation, find_alerts, recommend, situation
from actors.watch.figures import without_effect
from actors.watch.metrics_log import Records
from actors.watch.run_state import failures
from configs.schema import Config
from tests.harness.watched import append, look, make_config, record, state

BUSY = Situation(versions=50, waits=0.62, parked=0.0, servers=2, max_staleness=4, gradient=0.1, gain=0.1)


def changed(**fields: object) -> Situation:
    return Situation(**(BUSY.__dict__ | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (BUSY, "The learner waits 62 % of the time: two more servers would halve that."),
        (changed(waits=0.5, servers=1), "The learner waits 50 % of the time: one more server would halve that."),
        (changed(waits=0.9, servers=8), "The learner waits 90 % of the time: 36 more servers would halve that."),
        (changed(waits=0.1), "The learner waits 10 % of the time: nothing has to change."),
        (changed(none_solved=1.0, gain=0.0), "Nothing is learned: 100 % of the groups have no right answer."),
        (changed(gradient=0.0), "Nothing is learned: the gradient is zero"),
        (changed(gradient=0.0, all_solved=1.0), "Nothing is learned any more: 100 % of the groups have only right"),
        (changed(all_solved=0.95), "Little is left to learn: 95 %"),
        (changed(failed=0.8, why_failed="reward failed 80 %"), "Most attempts fail: reward failed 80 %."),
        (changed(flat=0.96), "96 % of the groups since the last batch had no variance, and batch.skip_zero_variance"),
        (Situation(versions=0, flat=0.96), "leaves them out: take easier problems if all fail, harder ones if all"),
        (
            changed(parked=0.5),
            "62 % of the time and 50 % of the servers' places get no work, because of the bound on age. Raise",
        ),
        (changed(max_staleness=0), "62 % of the time because the run is synchronous: batch.max_staleness 1"),
        (changed(wanted=4), "62 % of the time: the run has asked for 4 servers and 2 are there."),
        (changed(wanted=2, servers=1), "the run has asked for 2 servers and 1 is there. Wait for the others."),
        (changed(waits=0.02, parked=0.5, servers=8), "the learner waits 2 %: three servers fewer would do."),
        (changed(waits=0.02, parked=0.5, servers=1), "nothing has to change."),
        (changed(waits=0.02, checkpoints=0.3), "Checkpoints take 30 % of the time: raise learner.checkpoint_every."),
        (changed(versions=2), "There are too few versions yet to recommend anything."),
        (changed(versions=2, over=True), "The run had too few versions to recommend anything."),
        (changed(over=True), "The learner waited 62 % of the time: two more servers would halve that."),
        (changed(over=True, waits=0.1), "The learner waited 10 % of the time: nothing has to change."),
        (changed(over=True, waits=0.02, parked=0.5, servers=8), "got no work and the learner waited 2 %: three"),
        (changed(over=True, gradient=0.0, all_solved=1.0), "right answers. Take harder problems."),
        (Situation(versions=0, over=True, waiting="nobody"), "No version was trained."),
        (Situation(versions=0, waiting="learner-0 waits for rollout-0"), "No version is trained yet: learner-0 waits"),
        (Situation(versions=0), "No version is trained yet."),
    ],
)
def test_recommendation(now: Situation, words: str) -> None:
    said = recommend(now)
    assert words in said and said.endswith(".") and "\n" not in said


def test_learning_comes_before_servers() -> None:
    assert "server" not in recommend(changed(none_solved=1.0, gain=0.0))


def test_more_servers_halve_the_wait_by_the_arithmetic_of_a_pipeline() -> None:
    """A version takes the longer of the learner's time and of what n servers need for a batch."""
    learner_s, batch_server_s = 3.8, 20.0
    for servers in (1, 2, 3, 4):
        waits = max(0.0, 1 - learner_s / max(learner_s, batch_server_s / servers))
        said = recommend(changed(waits=waits, servers=servers))
        found = re.search(r": (\w+) more server", said)
        if waits <= 0.15:
            assert found is None
            continue
        more = ["no", "one", "two", "three", "four"].index(found[1]) if found else 0
        then = max(0.0, 1 - learner_s / max(learner_s, batch_server_s / (servers + more)))
        fewer = max(0.0, 1 - learner_s / max(learner_s, batch_server_s / (servers + more - 1)))
        assert more and then <= waits / 2 < fewer


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


def records_of(config: Config) -> Records:
    return Records(config.run.path / "metrics.jsonl")


def test_the_situation_is_read_off_records_and_state(config: Config) -> None:
    append(config.run.path, *(record(version) for version in range(1, 41)), look(1.0, 40))
    now = situation(config, records_of(config), state())
    assert now.waits == pytest.approx(0.62) and now.servers == 1, "the other one is lost"
    assert now.parked == 0.0 and now.none_solved == pytest.approx(0.3) and now.gain == pytest.approx(0.25)
    assert now.gradient == pytest.approx(0.14) and now.versions == 40
    assert situation(config, records_of(config), None).servers == 2, "as the last look has it"


@pytest.mark.parametrize("share", [None, 1.0])
def test_groups_without_a_right_answer_are_no_trouble_where_a_teacher_teaches_them(
    config: Config, share: float | None
) -> None:
    none = {"groups/solved_none": 1.0, "reward/mean": 0.0} | ({} if share is None else {"teacher/share": share})
    append(config.run.path, *(record(version, **none) for version in range(1, 60)))
    said = recommend(situation(config, records_of(config), None))
    assert ("Nothing is learned: 100 % of the groups have no right answer" in said) is (share is None)
    alerts = find_alerts(config, records_of(config), None, 1.0, live=True)
    assert any("groups/solved_none" in one.text for one in alerts) is (share is None)


def test_a_lost_server_is_named_with_what_happens_and_where_to_look(config: Config) -> None:
    append(config.run.path, *(record(version) for version in range(1, 9)))
    (first, *_) = find_alerts(config, records_of(config), state(), 1.0, live=True)
    assert first.level == "bad" and first.text.startswith("rollout-1 is lost: silent for 240 s; its leases have ended")
    assert "logs/rollout-1.log" in first.text
    assert not any("lost" in one.text for one in find_alerts(config, records_of(config), state(), 1.0, live=False))


def test_a_run_that_stalls(config: Config) -> None:
    append(config.run.path, *(record(version) for version in range(1, 9)))
    quiet = state(servers={})
    assert find_alerts(config, records_of(config), quiet, 60.0, live=True) == []
    (alert,) = find_alerts(config, records_of(config), quiet, 400.0, live=True)
    assert alert.text.startswith("no version for 400 s, one usually takes 10.0 s")


def test_the_learners_rules_and_failures_are_alerts_too(config: Config) -> None:
    append(config.run.path, *(record(version, **{"length/truncated": 0.4}) for version in range(1, 9)))
    failing = state(servers={}, failed={"reward: KeyError": 100})
    texts = [alert.text for alert in find_alerts(config, records_of(config), failing, 1.0, live=True)]
    assert any(text.startswith("length/truncated is 0.4") for text in texts)
    assert any(text.startswith("reward failed 28 % of 352 attempts") for text in texts)


def test_groups_in_quarantine_are_an_alert_with_the_command_that_lists_them(config: Config) -> None:
    held = state(servers={}, counts={"trained": 8, "quarantined": 1})
    append(
        config.run.path, *(record(version, **{"buffer/quarantined": float(version == 8)}) for version in range(1, 9))
    )
    bad, warn = find_alerts(config, records_of(config), held, 1.0, live=True)
    assert bad.level == "bad" and bad.text.startswith("1 group is in quarantine, because the learner cannot train on")
    assert warn.text.startswith("buffer/quarantined is 1, 0 in the median of 7 versions: groups cannot be trained")
    assert all("`python -m buffer quarantine RUN`" in alert.text for alert in (bad, warn))
    assert (
        failures(held) == 'reward failed 1.6 % of 256 attempts, most often KeyError "answer" (4); 1 group in quarantine'
    )


def test_preemptions_that_go_on(config: Config) -> None:
    looks = [look(float(time), 1, **{"servers/preempted": float(5 * time)}) for time in range(12)]
    append(config.run.path, *looks, record(1))
    (alert,) = find_alerts(config, records_of(config), state(servers={}), 1.0, live=True)
    assert alert.text.startswith("vLLM preempts sequences all the time, 55 so far")


def test_keys_that_remedies_name_exist(config: Config) -> None:
    source = (Path(__file__).parents[3] / "actors" / "watch" / "advice.py").read_text()
    named = set(
        re.findall(r"\b((?:batch|learner|buffer|rollout)\.[a-z_]+)", re.sub(r"^from .*$", "", source, flags=re.M))
    )
    known = {f"{section}.{key}" for section, values in config.model_dump().items() for key in values}
    assert {name for name in named if name.partition(".")[2] not in ("wire", "py", "log")} <= known


def test_groups_that_a_filter_leaves_out_are_counted_once_they_are_many(config: Config) -> None:
    groups = config.batch.groups
    few = state(recent_groups={"zero variance": groups - 1})
    many = state(recent_groups={"zero variance": 9 * groups, "varied": groups})
    assert situation(config, records_of(config), few).flat == 0.0
    assert situation(config, records_of(config), many).flat == pytest.approx(0.9)
    assert situation(config, records_of(config), None).flat == 0.0


@pytest.mark.parametrize(("key", "level"), [("gradient/skipped", "bad"), ("gradient/zero", "warn")])
def test_steps_without_effect_are_alerts_and_counted(config: Config, key: str, level: str) -> None:
    append(config.run.path, *(record(version, **{key: float(version in (3, 7, 8))}) for version in range(1, 9)))
    records = records_of(config)
    found = find_alerts(config, records, state(servers={}), 1.0, live=True)
    assert [alert.level for alert in found if alert.text.startswith(f"{key} is 1: ")] == [level]
    assert any(alert.text.startswith("the last 2 steps") and "has the cause" in alert.text for alert in found)
    (line,) = without_effect(records)
    assert line.startswith("3 of 8 steps ") and line.endswith("the last 2 in a row; logs/learner.log has the cause")
    append(config.run.path, record(9, **{key: 0.0}))
    (line,) = without_effect(records_of(config))
    assert line.startswith("3 of 9 steps ") and "the last one to version 8" in line
    assert not any(
        "has the cause" in alert.text for alert in find_alerts(config, records_of(config), None, 1.0, live=True)
    )
