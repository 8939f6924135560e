"""Each case of the table is visible in every place, and the run ends as it should. The page has a row for each case.

The fast lane has ARCHETYPES, the long lane the other cases. A reward or task that harms its process in another way
differs from an archetype only inside the cage (`tests/rollout/cage/`). A case with another result differs only where
results are judged (`tests/rollout/test_rewards.py`, `tests/rollout/episodes/`).
"""

from pathlib import Path
from typing import Any

import pytest

from tests.system.failures.__main__ import HEAD, PAGE
from tests.system.failures.cases import CASES, Case
from tests.system.failures.story import tell

ARCHETYPES = {
    "a reward that always raises",  # the run is given up
    "a reward that raises for a third of the rows, 40 problems for one epoch",  # the data ends early
    "a reward that hangs",
    "a task that calls os._exit",
    "a flood of malformed messages at the buffer",  # the run ends well
    "prompts that are all too long",  # no attempt is made
}
"""One case for each way in which failures are shown and end a run."""
LOGS_BYTES = 8 << 20
"""What all logs of a run may take, also of one whose reward prints for ever."""


def places(case: Case) -> set[str]:
    """Where the case's words come up."""
    return {"terminal", "status", f"logs/{case.log}.log"} if case.says else set()


def lane(case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[] if case.name in ARCHETYPES else pytest.mark.long)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("case", [lane(case) for case in CASES])
def test_a_failure_is_seen_everywhere_and_ends_as_it_should(case: Case, tmp_path: Path) -> None:
    story = tell(case, tmp_path)
    assert story.code == case.code, story.text[-3000:]
    assert story.logs_bytes < LOGS_BYTES
    assert set(story.seen) == places(case) | ({f"status ({case.early})"} if case.early else set()), story.text[-3000:]
    if case.ends:
        last = story.text[story.text.rindex("python -m learner: ") :]
        assert case.ends in last.splitlines()[0]
        assert last.count("for example ") == (3 if case.code == 1 else 0)
        assert case.says in last


def test_every_archetype_is_a_case() -> None:
    assert {case.name for case in CASES} >= ARCHETYPES


def test_the_page_is_that_of_these_cases() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith(HEAD)
    rows = [line.strip("| ").split(" | ") for line in page.removeprefix(HEAD).splitlines()]
    assert [cells[0] for cells in rows] == [case.name for case in CASES]
    for cells, case in zip(rows, CASES, strict=True):
        assert len(cells) == 5 and case.says in cells[1] and all(place in cells[2] for place in places(case))
        assert cells[3].startswith(f"exit code {case.code}: ") and case.ends in cells[3]
