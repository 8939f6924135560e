"""Counts optimizer steps that changed nothing, logs their cause, and ends a run that has only such steps. All ranks
have the same norm of the gradient, so they end together."""

import logging
from collections.abc import Callable, Mapping

import torch.distributed as dist

log = logging.getLogger(__name__)
MOST_SKIPPED = 20
"""Skipped steps in a row that end the run."""
UNFIT_ADVANTAGES, TAUGHT = "advantages_unfit", "advantages_nonzero"
"""Sums over turns: advantage not finite, advantage not zero."""


NOTHING_LEFT = "the model gives every trained token the probability 1; end the run"


CRITIC_UNFIT = "the critic's gradient is not finite; lower algorithm.critic.learning_rate, and look at its rewards"
CRITIC_RIGHT = "each value of the critic is the return already, as at the start where every reward is 0"


class StepsSkipped(RuntimeError):
    """The run no longer trains."""


class SkippedSteps:
    """`note` each step, `check` before the next, `check_end` at the end."""

    def __init__(self) -> None:
        self.in_row = self.zero_in_row = 0
        self._last, self._why = 0, ""

    def note(
        self, version: int, rewards: tuple[float, float], metrics: Mapping[str, float], sums: Mapping[str, float]
    ) -> None:
        """Note the step to `version`. `rewards`: the batch's smallest and largest."""
        self._note(version, metrics, lambda: why_skipped(rewards, metrics, sums), lambda: why_zero(sums))

    def note_supervised(self, version: int, metrics: Mapping[str, float]) -> None:
        sums = {UNFIT_ADVANTAGES: 0.0}
        self._note(version, metrics, lambda: why_skipped((0.0, 0.0), metrics, sums), lambda: NOTHING_LEFT)

    def note_critic(self, version: int, metrics: Mapping[str, float]) -> None:
        self._note(version, metrics, lambda: CRITIC_UNFIT, lambda: CRITIC_RIGHT)

    def _note(
        self, version: int, metrics: Mapping[str, float], why: Callable[[], str], why_none: Callable[[], str]
    ) -> None:
        self._last = version
        self.in_row = self.in_row + 1 if metrics["gradient/skipped"] else 0
        self.zero_in_row = self.zero_in_row + 1 if metrics["gradient/zero"] else 0
        if self.in_row:
            self._why = why()
            self._warn("version %d: the step was skipped, the weights stay as they are: %s", version, self._why)
        elif self.zero_in_row and self.zero_in_row & (self.zero_in_row - 1) == 0:  # 1, 2, 4, 8, ...
            many = f"{self.zero_in_row} in a row" if self.zero_in_row > 1 else "the first one"
            self._warn("version %d: the gradient is zero, %s: %s", version, many, why_none())

    def check(self) -> None:
        if self.in_row >= MOST_SKIPPED:
            raise StepsSkipped(f"the run was given up at version {self._last}: {self._text()}")

    def check_end(self) -> None:
        if 0 < self._last == self.in_row or self.in_row >= MOST_SKIPPED:
            raise StepsSkipped(f"the run ended at version {self._last} without a result: {self._text()}")

    def _text(self) -> str:
        steps = "the last step was" if self.in_row == 1 else f"the last {self.in_row} steps were all"
        return f"{steps} skipped, lately because {self._why}"

    def _warn(self, line: str, *values: object) -> None:
        if dist.get_rank() == 0:
            log.warning(line, *values)


def may_retake(metrics: Mapping[str, float]) -> bool:
    """Whether a group of the batch may be at fault, without which the batch is taken again (`learner/sound.py`)."""
    return bool(metrics["gradient/skipped"] and not metrics["gradient/overflowed"])


def why_skipped(rewards: tuple[float, float], metrics: Mapping[str, float], sums: Mapping[str, float]) -> str:
    """Why the gradient is not finite, and the remedy."""
    if sums[UNFIT_ADVANTAGES]:
        least, largest = rewards
        return (
            f"advantages exceed float32, with rewards from {least:.3g} to {largest:.3g}; bound the reward, or take "
            "algorithm.advantage: group_std"
        )
    if not -float("inf") < metrics["loss"] < float("inf"):
        return f"the loss is {metrics['loss']:g}; lower learner.lr, and look at the last batch's samples"
    if metrics["gradient/overflowed"]:
        return "the norm of the gradient exceeds float32, but its parts do not; bound the reward, lower learner.lr"
    return "a part of the gradient is not finite; lower learner.lr, and look at the last batch's samples"


def why_zero(sums: Mapping[str, float]) -> str:
    """Why the gradient is zero, and the remedy."""
    if sums[TAUGHT]:
        return "the loss masks every token; widen its bounds, or lower batch.max_staleness"
    return (
        "no advantage differs from zero: the samples of each group have the same reward, or are masked as overlong; "
        "take other problems, raise batch.samples, or look at the reward"
    )
