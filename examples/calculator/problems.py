"""The calculator's problems: `17*6-9=` and the like, reckoned from left to right.

Used by `make_problems.py`, and by the environment in `environment/`, whose Python has this file and `task.py` only.
"""

import random
from itertools import product

from examples.calculator.task import calculate

Problem = tuple[int, str, int, str, int]
"""Example: `(17, "*", 6, "-", 9)`."""


def steps(problem: Problem) -> list[str]:
    """The calls of the calculator that solve a problem, and the answer. Example: `["17*6", "102-9", "93"]`."""
    first = f"{problem[0]}{problem[1]}{problem[2]}"
    second = f"{calculate(f'<calc>{first}</calc>')}{problem[3]}{problem[4]}"
    return [first, second, calculate(f"<calc>{second}</calc>") or "-"]


def problems() -> list[Problem]:
    """All there are, in order."""
    every = product(range(10, 100), "+-*", range(2, 10), "+-", range(2, 10))
    return [problem for problem in every if steps(problem)[-1][0] != "-"]


def row(problem: Problem) -> dict[str, str]:
    """One row. Example: `{"problem": "17*6-9=", "answer": "93"}`."""
    return {"problem": "".join(map(str, problem)) + "=", "answer": steps(problem)[-1]}


def split(seed: int, held_out: int) -> dict[str, list[dict[str, str]]]:
    """All rows in random order, parted in `eval` and `train`."""
    found = problems()
    random.Random(seed).shuffle(found)
    rows = [row(problem) for problem in found]
    return {"eval": rows[:held_out], "train": rows[held_out:]}
