"""The rule that asks for servers and gives them back: played against a run of lognormal group times, real admission
arithmetic and servers that start late; and what it says of one window."""

import heapq
import math
import random
from dataclasses import dataclass, field

import pytest

from actors.scaling.rule import Look, Rule, Wish

GROUPS, SLOTS, TRAIN_S, TICK_S, HOUR = 32, 16, 20.0, 10.0, 3600.0
MOST = 24


def group_s(now: float) -> float:
    """Mean time of a group in its place: answers double after 4 h, and shrink to a quarter after 8 h."""
    return 80.0 * (1.0 if now < 4 * HOUR else 2.0 if now < 8 * HOUR else 0.5)


@dataclass
class Played:
    """A simulated run."""

    staleness: int = 4
    starts_s: float = 90.0
    servers: int = 1
    rule: Rule | None = None
    seed: int = 0
    changes: list[tuple[float, int, int]] = field(default_factory=list)
    """Hour, servers before and after."""
    versions: int = 0
    advice: set[str] = field(default_factory=set)

    def play(self, hours: float) -> "Played":
        draw = random.Random(self.seed)
        ready = dict.fromkeys(range(self.servers), 0.0)
        free, leaving, wanted, next_number = dict.fromkeys(ready, SLOTS), set[int](), self.servers, self.servers
        events: list[tuple[float, str, int]] = [(TICK_S, "tick", -1)]
        opened = stored = made = 0
        training, now = False, 0.0
        while now < hours * HOUR:
            for one in sorted(ready):
                while ready[one] <= now and one not in leaving and free[one] and opened < (self.staleness + 1) * GROUPS:
                    free[one], opened = free[one] - 1, opened + 1
                    takes_s = draw.lognormvariate(math.log(group_s(now)) - 0.32, 0.8)
                    heapq.heappush(events, (now + takes_s, "done", one))
            now, what, one = heapq.heappop(events)
            if what == "done":
                stored, made, free[one] = stored + 1, made + 1, free[one] + 1
            elif what == "trained":
                training, self.versions = False, self.versions + 1
            else:
                heapq.heappush(events, (now + TICK_S, "tick", -1))
                live = [one for one in ready if ready[one] <= now and one not in leaving]
                busy = len(live) < wanted or any(free[one] < SLOTS for one in leaving)
                wish = self.ask(now, busy, live, free, opened - stored - training * GROUPS, made, not training)
                if wish:
                    self.changes.append((now / HOUR, wanted, wish.servers))
                    for _ in range(wish.servers - wanted):
                        ready[next_number] = now + self.starts_s * draw.uniform(0.7, 2)
                        free[next_number], next_number = SLOTS, next_number + 1
                    leaving |= set(sorted(live, reverse=True)[: max(0, wanted - wish.servers)])
                    wanted = wish.servers
            if not training and stored >= GROUPS:
                training, stored, opened = True, stored - GROUPS, opened - GROUPS
                heapq.heappush(events, (now + TRAIN_S * draw.uniform(0.9, 1.1), "trained", -1))
        self.servers = wanted
        return self

    def ask(
        self, now: float, busy: bool, live: list[int], free: dict[int, int], leased: int, made: int, waits: bool
    ) -> Wish | None:
        if self.rule is None:
            return None
        if busy:
            self.rule.changing(now)
            return None
        parked = sum(free[one] for one in live)
        look = Look(now, self.versions, waits, SLOTS * len(live), parked, max(0, leased), made)
        wish = self.rule.look(look, len(live), MOST)
        self.advice.add(self.rule.advice)
        return wish


def test_it_finds_the_number_and_keeps_it_until_the_answers_change() -> None:
    """Enough for the answers of each regime within half an hour, and hardly a change between the two that come."""
    full = Played(servers=MOST).play(12)
    played = Played(rule=Rule(1, MOST, 4)).play(12)
    at = {hour: [after for when, _, after in played.changes if when < hour][-1] for hour in (0.75, 4.0, 5.0, 8.0, 12.0)}
    assert 8 <= at[0.75] <= 12 and 16 <= at[5.0] <= MOST and 4 <= at[12.0] <= 6, played.changes
    assert len(played.changes) <= 12, played.changes
    assert not [change for change in played.changes if 1 < change[0] < 4 or 5.5 < change[0] < 8], played.changes
    assert played.versions > 0.93 * full.versions


@pytest.mark.parametrize("seed", range(1, 4))
def test_servers_that_start_late_do_not_make_it_ask_twice(seed: int) -> None:
    played = Played(rule=Rule(1, MOST, 4), starts_s=600.0, seed=seed).play(4)
    assert played.servers <= 13 and len(played.changes) <= 8, played.changes


def test_where_the_bound_on_age_holds_both_it_says_so_and_changes_nothing() -> None:
    played = Played(staleness=0, servers=4, rule=Rule(1, MOST, 0)).play(4)
    assert not [change for change in played.changes if change[0] > 1], played.changes
    assert any("batch.max_staleness (0)" in advice for advice in played.advice), played.advice


def window(rule: Rule, begin: float, waits: float, parked: float, servers: int = 4, free: int = 99) -> Wish | None:
    """Show `rule` a minute in which the learner waits for this share of the time; what it wishes at the end."""
    wish = None
    for second in range(61):
        at, made = begin + second, int(begin) + second
        look = Look(at, int(at) // 10, (second * waits) % 1 + waits >= 1, 100.0, 100.0 * parked, 40, made)
        wish = wish or rule.look(look, servers, free)
    return wish


def test_one_window_is_enough_where_the_learner_waits_most_of_the_time_and_two_are_needed_else() -> None:
    assert (wish := window(Rule(1, 8, 4), 0, waits=1.0, parked=0.0)) and wish.servers == 8
    assert "the learner waited 100%" in wish.why and "0% of the servers' places were parked" in wish.why
    rule = Rule(1, 8, 4)
    assert window(rule, 0, waits=0.0, parked=0.0) is None
    assert window(rule, 61, waits=0.25, parked=0.0) is None
    assert (wish := window(rule, 122, waits=0.25, parked=0.0)) and wish.servers == 6


@pytest.mark.parametrize(("free", "most", "to"), [(99, 8, 8), (2, 8, 6), (99, 5, 5), (0, 8, None), (99, 4, None)])
def test_it_asks_for_no_more_than_there_is_room_for(free: int, most: int, to: int | None) -> None:
    wish = window(Rule(1, most, 4), 0, waits=1.0, parked=0.0, free=free)
    assert (wish and wish.servers) == to


def test_a_learner_that_went_back_begins_the_window_anew() -> None:
    rule = Rule(1, 8, 4)
    for at, version in ((0.0, 50), (59.0, 55), (60.0, 40), (119.0, 43)):
        assert rule.look(Look(at, version, True, 10, 0, 4, int(at)), 1, 9) is None
    assert rule.look(Look(121.0, 43, True, 10, 0, 4, 121), 1, 9)
