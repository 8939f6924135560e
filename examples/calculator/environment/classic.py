"""The calculator for `verifiers` before 0.4: an environment that answers the model's calls."""

from typing import Any

import verifiers as vf
from datasets import Dataset

from examples.calculator.problems import split
from examples.calculator.task import TURNS, calculate, score


def said(messages: Any) -> str:
    """The text of the last message."""
    return messages[-1].content or ""


class Calculator(vf.MultiTurnEnv):
    """Ends with the first message that is no call."""

    @vf.stop
    async def answered(self, state: Any) -> bool:
        """Whether the model's last message is its answer."""
        return bool(state["trajectory"]) and calculate(said(state["trajectory"][-1]["completion"])) is None

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        """What the calculator shows."""
        return [vf.UserMessage(content=calculate(said(messages)))]


def right(completion: Any, answer: str) -> float:
    """The reward."""
    return score(said(completion), answer)


def load_environment(seed: int = 0, held_out: int = 200) -> vf.Environment:
    """The environment with the problems of `make_problems --seed SEED --eval HELD_OUT`."""
    train, kept = (
        [{"prompt": [{"role": "user", "content": row["problem"]}], "answer": row["answer"]} for row in rows]
        for rows in (split(seed, held_out)[name] for name in ("train", "eval"))
    )
    data = {"dataset": Dataset.from_list(train), "eval_dataset": Dataset.from_list(kept)}
    return Calculator(**data, rubric=vf.Rubric(funcs=[right]), max_turns=TURNS)
