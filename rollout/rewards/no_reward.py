"""A run without a reward (`reward.function: none`), which learns from a teacher alone: every reward is 0.

Takes the place of `RewardPool`; waits for nothing.
"""

from collections.abc import Sequence

from rollout.rewards.convention import Answer, Score


class NoReward:
    """Has no workers. An async context manager as `RewardPool` is."""

    asks = frozenset[str]()

    async def __aenter__(self) -> "NoReward":
        return self

    async def __aexit__(self, *error: object) -> None:
        """Does nothing: there are no workers to end."""

    async def score(self, answers: Sequence[Answer]) -> list[Score]:
        """0 for each answer."""
        return [Score(0.0) for _ in answers]
