"""The reward of the vision quickstart: the share of colours that are right, 0 for another number of words."""


def compute_score(solution_str: str, ground_truth: str) -> float:
    """Example: `compute_score("red blue", "red gold")` is 0.5."""
    said, right = solution_str.split(), ground_truth.split()
    return sum(a == b for a, b in zip(said, right, strict=True)) / len(right) if len(said) == len(right) else 0.0
