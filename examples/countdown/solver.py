"""Countdown by brute force: every flat expression over the given numbers, and those that hit a target.

Consumes nothing but its arguments. Used by `make_model` for the warm start's examples; meant for three or four numbers.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from rollout.rewards.countdown import evaluate


def expressions(numbers: Sequence[int], operations: str) -> Iterator[str]:
    """Each distinct `a?b?c` without parentheses that uses every number once: 3 numbers, 2 operations: at most 24."""
    for order in sorted(set(permutations(numbers))):
        for signs in product(operations, repeat=len(numbers) - 1):
            yield str(order[0]) + "".join(sign + str(number) for sign, number in zip(signs, order[1:], strict=True))


def solutions(numbers: Sequence[int], target: int, operations: str) -> list[str]:
    """The expressions of `numbers` that equal `target`; empty if only parentheses would do."""
    return [text for text in expressions(numbers, operations) if equals(text, target)]


def equals(text: str, target: int) -> bool:
    """Whether the expression has that value; one that divides by zero has none."""
    try:
        return evaluate(text).value == target
    except ZeroDivisionError:
        return False
