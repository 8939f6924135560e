"""The calculator for `verifiers` from 0.4 on: a task set, and an environment that answers the model's calls."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from examples.calculator.problems import split
from examples.calculator.task import TURNS, calculate, score


class CalculatorData(vf.TaskData):
    """A problem, and what is right."""

    answer: str


class CalculatorTask(vf.Task[CalculatorData]):
    """Scores an episode."""

    @vf.reward
    async def right(self, trace: Any) -> float:
        """The reward."""
        return score(trace.last_reply, self.data.answer)


class CalculatorConfig(vf.TasksetConfig):
    """The problems are those of `make_problems --seed SEED --eval HELD_OUT`."""

    seed: int = 0
    held_out: int = 200


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    """The problems to train on."""

    def load(self) -> Iterator[CalculatorTask]:
        """See `CalculatorConfig`."""
        for row in split(self.config.seed, self.config.held_out)["train"]:
            yield CalculatorTask(CalculatorData(prompt=row["problem"], answer=row["answer"]), self.config.task)


class CalculatorEnv(vf.Env[vf.SingleAgentEnvConfig]):
    """Ends with the first message that is no call."""

    async def run(self, task: Any, agents: Any) -> None:
        """One episode."""
        empty = CalculatorTask(task.data.model_copy(update={"prompt": None}), task.config)
        value = task.data.prompt
        async with agents.agent.interaction(empty) as talk:
            for _ in range(TURNS):
                reply = await talk.turn(value)
                value = calculate(reply.last_reply)
                if reply.terminated or value is None:
                    break
