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
    flood: bool = False
    """Somebody sends the buffer malformed messages all the time."""
    log: str = "rollout-0"
    """The process whose log has the words."""
    early: str = ""
    """Words of status before any attempt has failed."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of the run file, by section."""

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


def hostile(name: str, says: str, body: str = GOOD, task: str = "", **settings: dict[str, Any]) -> Case:
    """A reward or task that no sample survives; three rows, of one attempt each."""
    return Case(name, says, 1, NOTHING, body, task, rows=3, settings=merged(ONCE, settings))


def merged(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sections of both."""
    return {name: one.get(name, {}) | other.get(name, {}) for name in one | other}


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
    hostile("a reward that calls os._exit", "ended its process (exit code 3)", "os._exit(3)"),
    hostile("a reward that calls sys.exit", "called sys.exit(0)", "sys.exit(0)"),
    hostile("a reward that reads address 0", "SIGSEGV", "import ctypes; ctypes.string_at(0)"),
    hostile("a reward that kills its process", "SIGKILL", "os.kill(os.getpid(), 9)"),
    hostile("a reward that never ends", "took longer than", "while True: pass", reward={"timeout_s": 1.0}),
    hostile(
        "a reward that holds the GIL for ever",
        "took longer than",
        "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
        reward={"timeout_s": 1.0},
    ),
    hostile(
        "a reward that prints for ever", "took longer than", "while True: print('x' * 999)", reward={"timeout_s": 1.0}
    ),
    hostile(
        "a reward that leaks",
        "reward.memory_gib",
        "kept = []\n    while True: kept.append(bytearray(2**23)); time.sleep(0.005)",
        reward={"memory_gib": 0.5},
    ),
    hostile(
        "a reward whose child takes the memory",
        "child: no memory",
        "import subprocess as s; assert not s.call([sys.executable, '-c', 'bytearray(2**30)']), 'child: no memory'",
        reward={"memory_gib": 0.5},
    ),
    hostile("a reward that allocates too much", "MemoryError", "bytearray(2**33)", reward={"memory_gib": 1.0}),
    hostile("a reward that recurses without end", "RecursionError", "return score(solution_strs, ground_truths)"),
    hostile("a reward that raises KeyboardInterrupt", "KeyboardInterrupt", "raise KeyboardInterrupt"),
    hostile("a reward that raises 5 MB of text", "ValueError", "raise ValueError('long ' * 10**6)"),
    hostile("a reward that closes every file", "ended its process", "os.closerange(0, 999)"),
    hostile(
        "a reward that starts daemons and hangs",
        "took longer than",
        "os.fork() or os.setsid(); time.sleep(99)",
        reward={"timeout_s": 1.0},
    ),
    Case(
        "a reward whose process dies between two calls",
        "",
        0,
        "",
        f"import threading; threading.Timer(0.1, os._exit, [3]).start(); {GOOD}",
    ),
    hostile("a reward that returns NaN", "nan", "return [float('nan')] * 2"),
    hostile("a reward that returns one number for two answers", "returned 1 rewards for 2", "return [1.0]"),
    Case("a reward that returns nothing", "None", 1, GIVEN_UP, "return None"),
    Case("a task that always raises", "task raised IndexError", 1, GIVEN_UP, task="[][0]"),
    hostile("a task that calls os._exit", "ended its process", task="os._exit(3)"),
    hostile("a task that calls sys.exit", "sys.exit", task="sys.exit(3)"),
    hostile(
        "a task that blocks its process",
        "rollout.task_timeout_s",
        task="time.sleep(99)",
        rollout={"task_timeout_s": 1.0},
    ),
    hostile(
        "a task that waits for ever",
        "rollout.task_timeout_s",
        task="import asyncio; await asyncio.sleep(99)",
        rollout={"task_timeout_s": 1.0},
    ),
    hostile("a task that returns nothing", "NoneType", task="return None"),
    hostile(
        "a task whose conversation gets too long", "leave no room", task="await generate(problem.prompt + [1] * 999)"
    ),
    hostile(
        "a task that returns broken columns",
        "differ in length",
        task="t = await single_turn(problem, generate); t.sampled.pop(); return t",
    ),
    Case("a flood of malformed messages at the buffer", "refused", 0, "", flood=True, log="buffer"),
    Case("prompts that are all too long", "data.max_prompt_tokens", 1, GIVEN_UP, long=True),
)
