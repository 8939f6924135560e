"""How long a collective has waited, by the watchdog's own clock."""

import time

from learner.watchdog import Waits


def entry(number: int, age_s: float) -> dict[str, object]:
    return {"group": "00", "collective_seq_id": number, "time_created_ns": time.time_ns() - int(age_s * 1e9)}


def test_a_collective_that_began_before_a_stop_has_not_waited_that_long() -> None:
    waits = Waits(at_most_s=5.0)
    assert 4.9 < waits.waited_s(entry(1, 3600.0), now=100.0) <= 5.0, "stopped, or the time of day was set"
    first = entry(2, 1.0)
    assert 0.9 < waits.waited_s(first, now=200.0) < 1.5
    assert 30.9 < waits.waited_s(first, now=230.0) < 31.5
    assert waits.waited_s(entry(3, -3600.0), now=231.0) == 0.0, "the time of day was set back"
