"""Stub of `verifiers` 0.2: the part of its API that `rollout/hosts/verifiers_host.py` and `calculator_classic.py` use.

The tests marked long play the same scenes with the real releases.
"""

import inspect

from verifiers.utils.env_utils import import_env_module


class InfraError(Exception):
    """The infrastructure of the episode failed."""


def stop(function):
    """Marks a method that ends an episode."""
    return function


class Rubric:
    """Reward functions, called with the arguments that they have as parameters. A function that raises scores 0."""

    def __init__(self, funcs):
        self.funcs = funcs

    async def score(self, **known):
        total = 0.0
        for function in self.funcs:
            try:
                total += await function(**{name: known[name] for name in inspect.signature(function).parameters})
            except Exception:
                continue
        return total


class MultiTurnEnv:
    """Turns of the model and of `env_response`, until `answered` or `max_turns`."""

    def __init__(self, dataset, rubric, max_turns=10):
        self.dataset, self.rubric, self.max_turns = dataset, rubric, max_turns
        self.requires_group_rollouts = any("completions" in inspect.signature(one).parameters for one in rubric.funcs)

    def get_dataset(self):
        return self.dataset

    async def run_rollout(self, row, client, model, sampling):
        state, completion = {"trajectory": [], "info": row["info"]}, []
        try:
            for _ in range(self.max_turns):
                said = await client.ask([*row["prompt"], *completion], model, sampling)
                completion.append({"role": "assistant", "content": said})
                state["trajectory"].append({"completion": completion[-1:]})
                if await self.answered(state):
                    break
                completion += await self.env_response(completion, state)
        except Exception as error:
            return {"error": {"error_chain_repr": f"{type(error).__name__}({error})"}}
        reward = await self.rubric.score(completion=completion, answer=row["answer"])
        return {"reward": reward, "metrics": {"right": reward}, "stop_condition": "answered"}


def load_environment(name, **arguments):
    """The environment of the module `name`."""
    try:
        return import_env_module(name).load_environment(**arguments)
    except Exception as error:
        raise RuntimeError(f"Failed to load environment '{name}': {error}") from error
