"""The calculator of tests/harness/calculator.py as an environment of `verifiers` before 0.4."""

import os

import verifiers as vf
from datasets import Dataset

ROWS = [("17*23=", "391"), ("6*7=", "42"), ("2+2=", "4")]


class Calculator(vf.MultiTurnEnv):
    """Answers what begins with a question mark."""

    @vf.stop
    async def answered(self, state):
        return bool(state["trajectory"]) and not said(state["trajectory"][-1]["completion"]).startswith("?")

    async def env_response(self, messages, state, **kwargs):
        print("an environment may print")
        asked = said(messages)[1:]
        if state["info"].get("fail"):
            raise vf.InfraError("the sandbox is gone")
        return [{"role": "user", "content": str(eval(asked))}]


def said(messages):
    last = messages[-1]
    return last["content"] if isinstance(last, dict) else last.content


def right(completion, answer):
    return float(said(completion) == answer)


def load_environment(how=""):
    """`how`: `fail` in the middle of an episode; `group`: score groups; `raise`, `exit`: while it is loaded."""
    if how == "raise":
        raise KeyError("data")
    if how == "exit":
        os._exit(5)
    rows = [
        {"prompt": [{"role": "user", "content": ask}], "answer": answer, "info": {how: True} if how else {"fine": True}}
        for ask, answer in ROWS
    ]
    if how == "group":

        def best(completions):
            return [1.0 for _ in completions]

        return Calculator(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[best]))
    return Calculator(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=4)
