"""A rollout server's scheduler that is told how many places it has, and times its steps.

For `benchmarks.admission`, which hands `scheduler` to vLLM and names the number in a file. The file is read, and what
was counted written beside it, every 0.25 s. Runs in vLLM's engine process; waits for nothing.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from rollout.engine.scheduling.scheduler import KeepingAsyncScheduler, KeepingScheduler

FILE = "HEADRACE_BENCHMARK_ADMISSION"
"""The environment variable that names the file."""
LOOK_S = 0.25


class Switched(KeepingScheduler):
    """Counts steps, their seconds and tokens, by whether they only decode (`pure`) or read prompts too (`mixed`)."""

    places = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file, self._look_at, self._ended_at = Path(os.environ[FILE]), 0.0, 0.0
        self._counts = {"pure": [0, 0.0, 0], "mixed": [0, 0.0, 0]}

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step. Those that run keep their places when there are fewer."""
        self._look()
        limit = self.rl_places = max(self.places, len(self.running))
        self.max_num_running_reqs = self.max_num_active_reqs = limit  # the latter: vLLM 0.32
        return super().schedule(*args, **kwargs)

    def _look(self) -> None:
        if (now := time.monotonic()) >= self._look_at:
            self._look_at, self.places = now + LOOK_S, int(self._file.read_text())
            part = self._file.with_suffix(".counted")
            part.write_text(json.dumps({"at": [now], **self._counts}))
            part.replace(self._file.with_suffix(".counts"))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        results = super().update_from_output(scheduler_output, model_runner_output)
        tokens, now = scheduler_output.total_num_scheduled_tokens, time.monotonic()
        if tokens and self._ended_at:
            mixed = tokens > len(scheduler_output.num_scheduled_tokens)
            counts = self._counts["mixed" if mixed else "pure"]
            for place, more in enumerate((1, now - self._ended_at, tokens)):
                counts[place] += more
        self._ended_at = now
        return results


class SwitchedAsync(Switched, KeepingAsyncScheduler):
    """The same where vLLM schedules a step before it has the tokens of the one before."""


def scheduler(*, vllm_config: Any, **rest: Any) -> Switched:
    """What vLLM calls for a scheduler (`scheduler_cls`)."""
    kind = SwitchedAsync if vllm_config.scheduler_config.async_scheduling else Switched
    return kind(vllm_config=vllm_config, **rest)
