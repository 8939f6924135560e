"""`reward.function: none`: a run that learns from a teacher alone."""

from collections.abc import Sequence

from rollout.rewards.convention import Answer, Score


class NoReward:
    """Each reward is 0."""

    asks = frozenset[str]()

    async def __aenter__(self) -> "NoReward":
        return self

    async def __aexit__(self, *error: object) -> None:
        """Does nothing."""

    async def score(self, answers: Sequence[Answer]) -> list[Score]:
        return [Score(0.0) for _ in answers]
