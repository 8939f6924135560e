"""Countdown by brute force: every expression without parentheses over the given numbers, and those that equal a target.

Used by `make_model.py` for the examples of the warm start; meant for three or four numbers.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from rollout.rewards.countdown import evaluate


def expressions(numbers: Sequence[int], operations: str) -> Iterator[str]:
    """Each distinct `a?b?c` that uses every number once; at most 24 for 3 numbers and 2 operations."""
    for order in sorted(set(permutations(numbers))):
        for signs in product(operations, repeat=len(numbers) - 1):
            yield str(order[0]) + "".join(sign + str(number) for sign, number in zip(signs, order[1:], strict=True))


def solutions(numbers: Sequence[int], target: int, operations: str) -> list[str]:
    """The expressions of `numbers` that equal `target`; empty if every solution needs parentheses."""
    return [text for text in expressions(numbers, operations) if equals(text, target)]


def equals(text: str, target: int) -> bool:
    """Whether the expression equals `target`; one that divides by zero equals nothing."""
    try:
        return evaluate(text).value == target
    except ZeroDivisionError:
        return False
