"""What can go wrong in users' code and data, a case each: the files, and what a person must see. Run by `story.py`.

A row more is a `Case` more. Rewards score the answers of a group; the row's `answer` is its number.
"""

from dataclasses import dataclass, field
from typing import Any

GOOD = "return [float(len(answer) % 2) for answer in solution_strs]"


@dataclass(frozen=True)
class Case:
    """`reward` is the body of `score(solution_strs, ground_truths)`, `task` that of an asynchronous task.

    `says` must be seen on the terminal, in the server's log and in status while the run goes on; `ends` are words of
    the last lines of the terminal, `code` is the exit code of the launch. `rows` are the rows of the data set.
    """

    name: str
    says: str
    code: int
    ends: str
    reward: str = GOOD
    task: str = ""
    rows: int = 200
    long: bool = False
    """All prompts are longer than `data.max_prompt_tokens`."""
    early: str = ""
    """Words of status before any attempt has failed."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the run file, by section."""

    def source(self) -> str:
        """The user's file."""
        head = "import os, sys, time\nfrom rollout.tasks.trajectory import single_turn\n\n\n"
        score = f"def score(solution_strs, ground_truths):\n    number = int(ground_truths[0])\n    {self.reward}\n"
        task = f"\n\nasync def task(problem, generate):\n    {self.task or 'pass'}\n"
        return f"{head}{score}{task}    return await single_turn(problem, generate)\n"


ONCE = {"data": {"epochs": 1}, "rollout": {"attempts": 1}}
"""A single attempt at each row."""
GIVEN_UP = "the run was given up after version 0 of 4"
NOTHING = "the data ended after version 0 of 4: 1 epoch of"
SOME = f"if number % 3 == 0: raise KeyError(7)\n    {GOOD}"

CASES = (
    Case("a reward that always raises", "ZeroDivisionError", 1, GIVEN_UP, "return 1 / 0"),
    Case(
        "a reward that always raises, 20 problems for one epoch",
        "ZeroDivisionError",
        1,
        NOTHING,
        "return 1 / 0",
        rows=20,
        settings={"data": {"epochs": 1}},
    ),
    Case("a reward that raises for a third of the rows", "KeyError", 0, "", SOME),
    Case(
        "a reward that raises for a third of the rows, 40 problems for one epoch",
        "KeyError",
        3,
        "the data ended after version",
        SOME,
        rows=40,
        settings=ONCE | {"run": {"versions": 8}},
    ),
    Case(
        "a reward that hangs",
        "took longer than reward.timeout_s",
        1,
        NOTHING,
        "time.sleep(99)",
        rows=3,
        early="scoring",
        settings=ONCE | {"reward": {"timeout_s": 2.0}},
    ),
    Case("a reward that kills its process", "ended its process", 1, NOTHING, "os._exit(3)", rows=3, settings=ONCE),
    Case("a reward that returns nothing", "None", 1, GIVEN_UP, "return None"),
    Case("a task that always raises", "the task raised IndexError", 1, GIVEN_UP, task="[][0]"),
    Case("prompts that are all too long", "data.max_prompt_tokens", 1, GIVEN_UP, long=True),
)
