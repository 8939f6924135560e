"""`python -m rollout evaluate CONFIG --models DIR [DIR ...] [--out FILE.json]`: greedy rewards on `data.eval`.

One vLLM engine loads one model after another. Prints one line per model; the file gets the numbers and two answers of
each. Needs neither buffer nor learner; waits for the engine and the reward workers only.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from configs.checks import existing
from configs.data.sources import needs_truth
from configs.entrypoint import DONE, split_flags
from configs.flow.sequences import max_sequences
from configs.load import ConfigError, read
from configs.schema import Config
from rollout.concurrency import Places
from rollout.engine.arguments import on_cpu
from rollout.episodes.episode import Episodes, Failure, Group
from rollout.episodes.prompts import without_images
from rollout.episodes.setup import RolloutSetup, check_server

if TYPE_CHECKING:
    from rollout.engine.vllm_engine import Engine

PROG = "python -m rollout evaluate"
SHOWN = 2
"""Answers of each model in the report."""
FLAGS: dict[str, dict[str, Any]] = {
    "models": {"nargs": "+", "type": Path, "action": "extend", "default": []},
    "out": {"type": Path},
}
USAGE = f"usage: {PROG} RUN.yaml [MORE.yaml ...] --models DIR [DIR ...] [--out FILE.json] [--section.key=value ...]"


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`; returns the exit code. Raises ValueError for input that cannot be used."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the table is what is wanted, not vLLM's log
    flags, rest = split_flags(argv, PROG, **FLAGS)
    config = read(rest, f"{PROG} --models DIR [DIR ...] [--out FILE.json]", partial(check_server, files=["data.eval"]))
    rows = load_rows(config, flags.models)
    results = uvloop.run(evaluate(config, RolloutSetup.load(config, "evaluate"), rows, flags.models))
    if flags.out:
        report = {"data": str(config.data.eval), "problems": len(rows), "models": results}
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps(report, indent=1) + "\n")
    return DONE


def load_rows(config: Config, models: Sequence[Path]) -> Sequence[dict[str, Any]]:
    """The rows of `data.eval`, read when they are asked for. Raises ConfigError if rows or `models` are missing, or the
    rows have images that the run cannot show."""
    if not models:
        raise ConfigError([f"--models: name one or more folders in Hugging Face format; {USAGE}"])
    if config.data.eval is None:
        raise ConfigError(["data.eval: null; name a file of problems that are kept out of training"])
    problem = "no config.json there; name a folder in Hugging Face format"
    if absent := [f"--models {model}: {problem}" for model in models if not (model / "config.json").is_file()]:
        raise ConfigError(absent)
    from buffer.problems import check_images, load_problems  # pyarrow: slow to import, and not used by a server

    truth = needs_truth(config)
    problems = load_problems(config.data.eval, config.data, existing(config.run.path), "data.eval", truth)
    check_images(config, problems, "eval")
    return problems


async def evaluate(
    config: Config, setup: RolloutSetup, rows: Sequence[dict[str, Any]], models: Sequence[Path]
) -> list[dict[str, Any]]:
    """Start an engine, evaluate each model, close the engine."""
    from rollout.engine.vllm_engine import Engine

    async with setup:
        engine = await Engine.start(config, config.run.seed)
        try:
            return await evaluate_models(config, setup, engine, rows, models)
        finally:
            await engine.close()


async def evaluate_models(
    config: Config, setup: RolloutSetup, engine: "Engine", rows: Sequence[dict[str, Any]], models: Sequence[Path]
) -> list[dict[str, Any]]:
    """One record per model, printed as soon as it is known."""
    episodes = setup.episodes(config, engine, temperature=0.0, samples=1)
    at_once = config.rollout.sequences
    places = Places(max_sequences(config, on_cpu(config)) if at_once == "auto" else at_once, samples=1)
    width = max(len(str(model)) for model in models)
    print(f"{'model':<{width}}  problems  reward  solved  failed", flush=True)
    results = []
    for model in models:
        await engine.load_folder(model)
        record = summary(str(model), await answer_all(episodes, rows, places), rows)
        numbers = f"{record['problems']:>8}  {record['reward']:>6.3f}  {record['solved']:>6.3f}  {record['failed']:>6}"
        print(f"{record['model']:<{width}}  {numbers}", flush=True)
        results.append(record)
    return results


async def answer_all(episodes: Episodes, rows: Sequence[dict[str, Any]], places: Places) -> list[Group | Failure]:
    """An answer to each row, or why there is none; as many at a time as there are places."""
    async with asyncio.TaskGroup() as tasks:
        answering = []
        for row in rows:
            await places.room()
            held = places.take()
            answering.append(tasks.create_task(episodes.attempt(row, held.free_one)))
            answering[-1].add_done_callback(held.free_all)
    return [task.result() for task in answering]


def summary(model: str, outcomes: Sequence[Group | Failure], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean reward, share of full rewards (1 or more), and the first answers, for people and for the report.

    Failed problems count in neither mean; they are listed instead.
    """
    samples = [(row, each.samples[0]) for row, each in zip(rows, outcomes, strict=True) if isinstance(each, Group)]
    failures = [each.reason for each in outcomes if isinstance(each, Failure)]
    count = max(len(samples), 1)
    return {
        "model": model,
        "problems": len(outcomes),
        "reward": sum(sample.reward for _, sample in samples) / count,
        "solved": sum(sample.reward >= 1.0 for _, sample in samples) / count,
        "length": sum(int(sample.sampled.numpy().sum()) for _, sample in samples) / count,
        "failed": len(failures),
        "reasons": sorted(set(failures))[:5],
        "examples": [
            {"problem": without_images(row), "answer": s.answer, "reward": s.reward} for row, s in samples[:SHOWN]
        ],
    }
