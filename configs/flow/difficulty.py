"""How many draws `data.difficulty` gives each kind of problem."""

from collections.abc import Mapping

from configs.schema import DifficultyConfig

KINDS = ("unsolved", "between", "solved")
"""Samples are never, sometimes and always solved."""
MOST_STEPS = 2000


def drawn_shares(
    difficulty: DifficultyConfig, problems: int, groups: int, versions: int, mixture: Mapping[str, float]
) -> dict[str, float]:
    """Share of draws for each of KINDS; `mixture` has the problems' shares."""
    seen, unseen, drawn = dict.fromkeys(KINDS, 0.0), float(problems), dict.fromkeys(KINDS, 0.0)
    step = max(1, versions // MOST_STEPS)
    rests = dict.fromkeys(KINDS, max(1, difficulty.rest))
    rests["solved"] += difficulty.return_after
    for _ in range(0, versions, step):
        room = {kind: seen[kind] * step / rests[kind] for kind in KINDS} | {"unseen": unseen}
        taken = split(groups * step, difficulty.shares, room)
        for kind in KINDS:
            new = taken["unseen"] * mixture[kind]
            drawn[kind] += taken[kind] + new
            seen[kind] += new
        unseen -= taken["unseen"]
    total = sum(drawn.values())
    return {kind: number / total for kind, number in drawn.items()}


def split(amount: float, weights: Mapping[str, float], room: Mapping[str, float]) -> dict[str, float]:
    """Divide `amount` by weights, each at most its room; the rest goes by room."""
    taken, left, opened = dict.fromkeys(weights, 0.0), amount, {name for name in weights if room[name] > 0}
    while left > 1e-9 and opened:
        total = sum(weights[name] for name in opened)
        parts = {name: min(left * weights[name] / total, room[name] - taken[name]) for name in opened}
        for name, part in parts.items():
            taken[name] += part
        left -= sum(parts.values())
        opened = {name for name in opened if room[name] - taken[name] > 1e-9}
    whole = sum(room.values())
    return {name: got + (left * room[name] / whole if whole else 0.0) for name, got in taken.items()}
