"""The reward for mathematics: is the answer equivalent to the ground truth, as math-verify judges?"""

from typing import Any


def compute_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0
) -> dict[str, float]:
    """`score` for an answer equivalent to `ground_truth` (LaTeX or plain), `format_score` for one that parses, else 0.

    Raises ValueError for a ground truth that does not parse, which is an error of the data.
    """
    from math_verify import parse, verify  # takes a second to import: paid only where this reward is used

    text = str(ground_truth)
    truth = parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)
    if not truth:
        raise ValueError(f"ground truth {text!r:.200} is not mathematics that math-verify can read")
    answer = parse(solution_str, parsing_timeout=None)
    solved = bool(answer) and verify(truth, answer, timeout_seconds=None)
    reward = score if solved else format_score if answer else 0.0
    return {"score": reward, "solved": float(solved), "formed": float(bool(answer))}
