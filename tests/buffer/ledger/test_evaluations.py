"""Who evaluates what: one server at a time, at most one result of each evaluation, whatever dies."""

import random
from typing import Any

import pytest

from buffer.ledger.evaluations import ATTEMPTS, Evaluations, Reach

A, B, A2 = "rollout-0#a", "rollout-1#b", "rollout-0#a2"


def reach(version: int, last: int | None = None) -> Reach:
    return Reach(version, last)


def make(every: int | None = 5) -> Evaluations:
    return Evaluations(every, lease_s=10.0)


def test_they_are_due_at_0_every_n_and_at_the_last_version():
    found = make()
    made = []
    for version in range(13):
        last = 12 if version == 12 else None
        due = found.claim(A, version, reach(version, last), 0.0)
        if due is not None:
            made.append(due)
            assert found.finish(A, due, version, f"r{version}", "", reach(23)) is None
    assert made == [0, 5, 10, 12]


def test_none_without_an_interval():
    found = make(None)
    assert found.claim(A, 0, reach(0), 0.0) is None and found.over(reach(0))
    assert found.beat(A, 0, None, reach(0), 0.0) == "none"


def test_one_server_at_a_time_and_a_repeated_claim_is_the_same():
    found = make()
    assert found.claim(A, 0, reach(0), 0.0) == 0
    assert found.claim(A, 0, reach(0), 1.0) == 0 and found.known[0].attempts == 1
    assert found.claim(B, 0, reach(0), 1.0) is None
    assert found.claim(B, 5, reach(5), 1.0) is None, "not even the next one: B has groups to make"
    assert found.beat(B, 5, None, reach(5), 1.0) == "none"


def test_what_is_still_to_be_done_when_the_next_one_is_due_is_left_out():
    found = make()
    assert found.claim(A, 5, reach(5), 0.0) == 5
    assert found.finish(A, 5, 5, "{}", "", reach(23)) is None
    assert found.claim(A, 23, reach(23), 0.0) == 20
    assert found.finish(A, 20, 23, "{}", "", reach(23)) is None
    assert sorted(found.known) == [5, 20] and found.claim(A, 24, reach(24), 0.0) is None


def test_a_dead_server_s_evaluation_is_made_by_another_at_the_version_it_has():
    found = make()
    assert found.claim(A, 5, reach(5), 0.0) == 5
    for now in (2.0, 4.0):
        assert found.beat(A, 5, 5, reach(7), now) == "none"
    assert found.beat(B, 7, None, reach(7), 13.9) == "none"
    assert found.beat(B, 7, None, reach(7), 14.0) == "due"
    assert found.claim(B, 7, reach(7), 14.0) == 5
    assert found.beat(A, 5, 5, reach(7), 14.5) == "over", "it was only slow"
    assert found.finish(B, 5, 7, "b", "", reach(23)) is None
    assert found.finish(B, 5, 7, "b", "", reach(23)) is None, "repeated"
    assert found.finish(A, 5, 5, "a", "", reach(23)) == "evaluation 5 is done"
    assert (found.known[5].version, found.known[5].results, found.known[5].server) == (7, "b", B)


def test_results_of_a_server_taken_for_dead_count_if_they_are_the_first():
    found = make()
    assert found.claim(A, 5, reach(5), 0.0) == 5 and found.claim(B, 7, reach(7), 20.0) == 5
    assert found.finish(A, 5, 5, "a", "", reach(23)) is None
    assert found.finish(B, 5, 7, "b", "", reach(23)) == "evaluation 5 is done"
    assert found.beat(B, 7, 5, reach(7), 21.0) == "over"


def test_a_restarted_server_takes_its_own_evaluation_over_at_once():
    found = make()
    assert found.claim(A, 5, reach(5), 0.0) == 5
    assert found.claim(A2, 6, reach(6), 1.0) == 5
    assert found.known[5].attempts == 2
    found.leave(A2)
    assert found.beat(B, 6, None, reach(6), 1.0) == "due"


def test_a_claim_whose_answer_was_lost_ends():
    found = make()
    assert found.claim(A, 5, reach(5), 0.0) == 5
    assert found.beat(A, 5, None, reach(5), 9.0) in ("none", "due")
    assert found.beat(A, 6, None, reach(6), 10.0) == "due" and found.known[5].state == "lost"
    assert found.claim(A, 6, reach(6), 10.0) == 5


def test_a_policy_that_a_rewind_undid_is_not_evaluated():
    found = make()
    assert found.claim(A, 10, reach(10), 0.0) == 10
    assert found.beat(A, 10, 10, reach(7), 1.0) == "over"
    assert found.claim(A, 10, reach(7), 1.0) is None
    assert found.claim(A, 7, reach(7), 2.0) == 5
    assert found.finish(A, 5, 7, "{}", "", reach(23)) is None
    assert found.claim(B, 10, reach(10), 3.0) == 10


def test_results_of_a_policy_that_a_rewind_undid_are_not_taken_up():
    found = make()
    assert found.claim(A, 10, reach(10), 0.0) == 10
    assert found.finish(A, 10, 10, "{}", "", reach(7)) == "its version was undone"
    assert found.known[10].state == "lost" and found.claim(B, 10, reach(10), 1.0) == 10
    assert found.finish(B, 10, 10, "{}", "", reach(10)) is None


def test_an_evaluation_whose_servers_all_die_is_given_up():
    found = make()
    for attempt in range(ATTEMPTS):
        assert found.claim(f"rollout-0#{attempt}", 5, reach(5, 5), 0.0) == 5
    assert not found.over(reach(5, 5))
    assert found.claim(B, 5, reach(5, 5), 100.0) is None
    ended = found.unknown([])
    assert ended is not None and (ended.state, ended.due) == ("failed", 5) and "lost 5 times" in ended.reason
    assert found.over(reach(5, 5))
    assert found.beat(B, 5, None, reach(5, 5), 101.0) == "none", "no server is asked for it again"


def test_results_come_in_order_and_end_with_the_last_version():
    found = make()
    for version in (0, 5, 7):
        due = found.claim(A, version, reach(version, 7 if version == 7 else None), 0.0)
        assert due == version and not found.over(reach(version, 7))
        found.finish(A, due, version, str(version), "samples", reach(23))
    assert [one.due if (one := found.unknown(known)) else None for known in ([], [0], [5, 0], [0, 5, 7])] == [
        *(0, 5, 7),
        None,
    ]
    assert found.over(reach(7, 7))


def test_everything_comes_back_from_the_store():
    found = make()
    found.claim(A, 0, reach(0), 0.0)
    found.finish(A, 0, 0, "zero", "s", reach(23))
    found.claim(A, 5, reach(5), 0.0)
    rows = found.changed
    assert rows[0].samples == "s"
    again = make()
    again.restore(rows.values(), now=100.0)
    assert again.claim(B, 6, reach(6), 101.0) is None, "its server is given time to be heard of"
    assert again.beat(A, 5, 5, reach(6), 102.0) == "none"
    assert again.finish(A, 5, 5, "five", "", reach(23)) is None
    assert again.finish(A, 5, 5, "five", "", reach(23)) is None and [one.results for one in again.known.values()] == [
        "zero",
        "five",
    ]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_there_is_one_result_of_one_version(seed: int):
    """Servers claim, die, finish late and restart, the learner rewinds, the buffer restarts: every evaluation has at
    most one result, of a version at or after which it was due and before the next; at most one runs; the last ends."""
    draw, found = random.Random(seed), make(3)
    version, now, last = 0, 0.0, 17
    servers: dict[str, dict[str, Any]] = {
        name: {"token": 0, "version": -1, "doing": None} for name in ("rollout-0", "rollout-1")
    }
    rows: dict[int, object] = {}

    def key(name: str) -> str:
        return f"{name}#{servers[name]['token']}"

    def bound() -> Reach:
        return Reach(version, last if version == last else None)

    for step in range(3000):
        now += draw.random() * 3
        name = draw.choice(list(servers))
        server, act = servers[name], draw.random()
        calm = step > 2000
        if act < 0.2 and not calm:
            version = min(last, version + 1) if draw.random() < 0.9 else max(0, version - draw.randrange(4))
        elif calm and act < 0.2:
            version = min(last, version + 1)
        elif act < 0.4 and server["doing"] is None:
            server["version"] = version
            due = found.claim(key(name), version, bound(), now)
            server["doing"] = None if due is None else (due, version)
        elif act < 0.6 and server["doing"]:
            due, of = server["doing"]
            found.finish(key(name), due, of, f"{name} {of}", "", bound())
            server["doing"] = None
        elif act < 0.8 and server["version"] >= 0:
            doing = server["doing"][0] if server["doing"] else None
            told = found.beat(key(name), server["version"], doing, bound(), now)
            if told == "over":
                server["doing"] = None
        elif act < 0.85 and not calm:
            found.leave(key(name))
            servers[name] = {"token": server["token"] + 1, "version": -1, "doing": None}
        elif act < 0.88:
            rows |= found.changed
            found = make(3)
            found.restore(rows.values(), now)
        results = [one for one in found.known.values() if one.state == "done"]
        assert all(one.due <= one.version <= last for one in results)
        assert sum(one.state == "running" for one in found.known.values()) <= 1
    rows |= found.changed
    assert found.over(Reach(last, last))
    assert found.known[last].state in ("done", "failed")
