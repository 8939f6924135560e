"""Bare `LLM.generate` in steady state: `python -m benchmarks.runs.bare RUN_FILE llm|llm-ours WAVES OUT`.

Keeps the server's number of sequences running (`max_num_seqs`) and has WAVES requests for each of them in one call. The
first ones have random lengths, so that ends are spread evenly as a server's are; all others have the full length. What
is counted begins when as many requests have ended as run at a time, and stops when the last one is admitted: until then
every place is taken and prompts are prefilled among generation, as in a server. As there, the samples of a group come
one after the other and have one prompt, which vLLM's prefix cache computes once. `llm`: its own defaults in everything
else. `llm-ours`: the server's engine arguments (budgets of tokens, CUDA graphs, head in float32). Both without
log-probabilities.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.runs.processes import PROMPT_TOKENS
from benchmarks.weights.table import progress
from benchmarks.weights.traffic import vocabulary_of
from configs.load import load
from configs.schema import Config
from rollout.engine.arguments import engine_arguments, on_cpu

OURS_ONLY = ("worker_extension_cls", "scheduler_cls", "disable_log_stats", "logprobs_mode")
OF_LLM = ("model", "dtype", "load_format", "max_model_len", "seed", "skip_tokenizer_init", "kv_cache_memory_bytes",
          "enforce_eager")  # fmt: skip


class EndTimes:
    """Stands for vLLM's progress bar: records when each request ended."""

    def __init__(self, total: int) -> None:
        self.at: list[float] = []
        self.total, self.n, self.postfix, self.format_dict = total, 0, "", {"elapsed": 1.0}

    def bar(self, prompts: Any = None, **_: Any) -> Any:
        """What vLLM calls: first around the prompts while it adds them, then for their ends."""
        return self if prompts is None else prompts

    def update(self, number: int) -> None:
        self.at += [time.monotonic()] * number
        if len(self.at) * 10 // self.total > (len(self.at) - number) * 10 // self.total:
            progress(f"bare generate: {len(self.at)} of {self.total} requests have ended")

    def refresh(self) -> None: ...
    def close(self) -> None: ...


def generate(config: Config, ours: bool, waves: int) -> dict[str, float]:
    """Tokens per second while every place is taken."""
    from vllm import LLM, SamplingParams

    arguments = engine_arguments(config, 1, on_cpu(config))
    chosen = {key: value for key, value in arguments.items() if (key not in OURS_ONLY if ours else key in OF_LLM)}
    running = running_of(config)
    chosen["max_num_seqs"] = running
    length, vocabulary, draw = config.sampling.max_tokens, vocabulary_of(config.model.path), random.Random(0)
    llm: Any = LLM(**chosen)
    progress("bare generate: vLLM has started")
    number = running * waves
    lengths = [draw.randrange(1, length) for _ in range(running)] + [length] * (number - running)
    group = config.batch.samples
    problems = [draw.choices(range(3, vocabulary), k=PROMPT_TOKENS) for _ in range(-(-number // group))]
    prompts: Any = [{"prompt_token_ids": problems[at // group]} for at in range(number)]
    parameters = [SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False) for tokens in lengths]
    llm.generate(prompts[: running // 8], parameters[: running // 8], use_tqdm=False)
    llm.generate(prompts, parameters, use_tqdm=(times := EndTimes(number)).bar)
    ends = times.at
    first, last = running, number - running
    seconds = ends[last - 1] - ends[first]
    return {"rate": (last - 1 - first) * length / seconds, "seconds": seconds}


def running_of(config: Config) -> int:
    """Sequences that run at a time in the server of this run file."""
    rollout: Any = config.rollout
    by_group = getattr(rollout, "groups_in_flight", 0) or 0
    number = getattr(rollout, "sequences", by_group * config.batch.samples)
    return int(number)


if __name__ == "__main__":
    file, name, waves, out = sys.argv[1:]
    found = generate(load([file]), name == "llm-ours", int(waves))
    part = Path(out).with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(out)  # whoever waits for it finds it complete
    sys.stdout.flush()
    os._exit(0)  # vLLM's objects complain when the interpreter takes them apart
