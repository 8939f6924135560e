"""A calculator to talk to, and a policy that uses it: one task in each way that a run can have it.

The policy asks for what it is to compute (`?17*23`), gets the result and answers with it; sums it answers at once,
wrongly.
"""

import re
from pathlib import Path
from typing import Any

from configs.load import load
from configs.schema import Config
from examples.countdown.make_model import make_tokenizer
from rollout.episodes.episode import Episodes
from rollout.episodes.setup import RolloutSetup
from tests.harness.fakes import FakeEngine

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ROWS: list[dict[str, Any]] = [
    {"problem": "17*23=", "answer": "391"},
    {"problem": "6*7=", "answer": "42"},
    {"problem": "2+2=", "answer": "4"},
]
REWARDS = [1.0, 1.0, 0.0]


class CalculatingEngine(FakeEngine):
    """Stands for `Engine`, with the policy above."""

    def __init__(self) -> None:
        super().__init__(self.say)
        self.tokenizer = make_tokenizer()

    def say(self, prompt: list[int]) -> list[int]:
        """The answer to a prompt."""
        asked = self.tokenizer.decode(prompt).rpartition("user: ")[2].partition("<|endoftext|>")[0]
        said = f"?{asked[:-1]}" if re.fullmatch(r"\d+\*\d+=", asked) else asked if asked.isdigit() else "5"
        return [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]


def calculator_config(folder: Path, task: str, *overrides: str) -> Config:
    """The quickstart with the calculator's model, in `folder`, and this task."""
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "model/config.json").write_text('{"model_type": "qwen2", "vocab_size": 112, "hidden_size": 64}')
    (folder / "chat.jinja").write_text(TEMPLATE)
    keys = {
        "run.folder": folder / "runs",
        "model.path": folder / "model",
        "data.chat_template": folder / "chat.jinja",
        "data.max_prompt_tokens": 100,
        "sampling.max_tokens": 24,
        "sampling.stop": [],
        "rollout.max_sample_tokens": 200,
        "rollout.task": task,
        "rollout.task_workers": 1,
        "rollout.engine": {},
        "reward.function": "task",
        "batch.samples": 2,
    }
    given = [f"--{key}={value}" for key, value in keys.items()]
    return load([str(ROOT / "examples/countdown/quickstart.yaml"), *given, *overrides])


def calculator(folder: Path, task: str, *overrides: str) -> tuple[RolloutSetup, Episodes, CalculatingEngine]:
    """What a rollout server has of such a run; enter the first before the second is used."""
    config, engine = calculator_config(folder, task, *overrides), CalculatingEngine()
    setup = RolloutSetup.load(config, "rollout-0")
    return setup, setup.episodes(config, engine, 1.0, config.batch.samples), engine  # type: ignore[arg-type]
