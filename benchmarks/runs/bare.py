"""Bare `LLM.generate` in steady state: `python -m benchmarks.runs.bare RUN_FILE llm|llm-ours WAVES OUT`.

Keeps the server's number of sequences running (`max_num_seqs`) and has WAVES requests for each of them in one call. The
first ones have random lengths, so that ends are spread evenly as a server's are; all others have the full length. What
is counted begins when as many requests have ended as run at a time, and stops when the last one is admitted: until then
every place is taken and prompts are prefilled among generation, as in a server. As there, the samples of a group come
one after the other and have one prompt, which vLLM's prefix cache computes once. `llm`: its own defaults in everything
else. `llm-ours`: the server's engine arguments (budgets of tokens, CUDA graphs, head in float32). Both without
log-probabilities. A model that sees gets the rows of the run file's data, images decoded; vLLM's own processor resizes
them to the same tokens, and its own cache has it do so once for a group.
"""

import io
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from benchmarks.runs.processes import PROMPT_TOKENS
from benchmarks.weights.table import progress
from benchmarks.weights.traffic import vocabulary_of
from buffer.data.images import ImageFormat
from configs.inner_command import inner_words
from configs.load import load
from configs.schema import Config
from rollout.engine.arguments import engine_arguments, on_cpu
from rollout.episodes.prompts import Prompts, load_tokenizer

OURS_ONLY = ("worker_extension_cls", "scheduler_cls", "disable_log_stats", "logprobs_mode", "mm_processor_cache_gb",
             "mm_device_do_normalize")  # fmt: skip
OF_LLM = ("model", "dtype", "load_format", "max_model_len", "seed", "skip_tokenizer_init", "kv_cache_memory_bytes",
          "enforce_eager", "limit_mm_per_prompt", "mm_processor_kwargs")  # fmt: skip


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

    form = ImageFormat.of(config.model.path, config.data)
    arguments = engine_arguments(config, 1, on_cpu(config), form)
    chosen = {key: value for key, value in arguments.items() if (key not in OURS_ONLY if ours else key in OF_LLM)}
    running = running_of(config)
    chosen["max_num_seqs"] = running
    length, draw = config.sampling.max_tokens, random.Random(0)
    llm: Any = LLM(**chosen)
    progress("bare generate: vLLM has started")
    number = running * waves
    lengths = [draw.randrange(1, length) for _ in range(running)] + [length] * (number - running)
    group = config.batch.samples
    problems = list(problems_of(config, form, -(-number // group), draw))
    prompts: Any = [problems[at // group] for at in range(number)]
    parameters = [SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False) for tokens in lengths]
    llm.generate(prompts[: running // 8], parameters[: running // 8], use_tqdm=False)
    llm.generate(prompts, parameters, use_tqdm=(times := EndTimes(number)).bar)
    ends = times.at
    first, last = running, number - running
    seconds = ends[last - 1] - ends[first]
    return {"rate": (last - 1 - first) * length / seconds, "seconds": seconds}


def problems_of(config: Config, form: ImageFormat | None, number: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """`number` prompts as vLLM takes them: random tokens, or for a model that sees rows of the data."""
    vocabulary = vocabulary_of(config.model.path)
    if form is None:
        for _ in range(number):
            yield {"prompt_token_ids": draw.choices(range(3, vocabulary), k=PROMPT_TOKENS)}
        return
    prompts = Prompts(load_tokenizer(config), config, form)
    rows = pq.read_table(str(config.data.train)).to_pylist()
    for row in (rows[at % len(rows)] for at in range(number)):
        files = [image["bytes"] for image in row["images"]]
        _, pictures = prompts.with_pictures({"images": files})
        problem: dict[str, Any] = {"prompt_token_ids": once(prompts.encode(row, pictures), form.image_token)}
        if files:
            problem["multi_modal_data"] = {"image": [Image.open(io.BytesIO(file)).convert("RGB") for file in files]}
        yield problem


def once(tokens: list[int], placeholder: int) -> list[int]:
    """`tokens` with one placeholder of each image, which vLLM's processor expands. Example: `[7, 9, 9, 8]` -> `[7, 9,
    8]` for 9."""
    before = [None, *tokens]
    return [token for token, last in zip(tokens, before, strict=False) if token != placeholder or last != placeholder]


def running_of(config: Config) -> int:
    """Sequences that run at a time in the server of this run file."""
    rollout: Any = config.rollout
    by_group = getattr(rollout, "groups_in_flight", 0) or 0
    number = getattr(rollout, "sequences", by_group * config.batch.samples)
    return int(number)


if __name__ == "__main__":
    inner_words("RUN_FILE", "llm|llm-ours", "WAVES", "OUT")
    file, name, waves, out = sys.argv[1:]
    found = generate(load([file]), name == "llm-ours", int(waves))
    part = Path(out).with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(out)  # whoever waits for it finds it complete
    sys.stdout.flush()
    os._exit(0)  # vLLM's objects complain when the interpreter takes them apart
