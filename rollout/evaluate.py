"""`python -m rollout evaluate CONFIG --models DIR [DIR ...] [--out FILE.json]`: greedy rewards on `data.eval`.

One vLLM engine takes the models in turn. Prints one line a model; the file gets the numbers and two answers of
each. Needs neither buffer nor learner; waits for the engine and the reward workers only.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvloop

from buffer.problems import load_problems
from buffer.wire.sample import Sample
from configs.checks import check
from configs.load import ConfigError, read
from configs.schema import Config
from rollout.episodes.episode import EpisodeError, Episodes, first_error, sampler
from rollout.episodes.setup import FILES, Parts
from rollout.interfaces import Sampler
from rollout.rewards import RewardError

log = logging.getLogger("rollout")
PROG = "python -m rollout evaluate"
SHOWN = 2
"""Answers of each model in the report."""
GREEDY = 0.0
USAGE = f"usage: {PROG} RUN.yaml [MORE.yaml ...] --models DIR [DIR ...] [--out FILE.json] [--section.key=value ...]"


class Judged(Sampler, Protocol):
    """An engine whose model can be changed."""

    async def load_folder(self, path: Path) -> None:
        """Run the Hugging Face model in this folder from now on."""


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`; returns the exit code."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # a table is wanted, not vLLM's story
    models, out, rest = arguments(argv)
    config = read(rest, f"{PROG} --models DIR [DIR ...] [--out FILE.json]", partial(check, files=(*FILES, "data.eval")))
    try:
        rows = wanted(config, models)
        parts = Parts.of(config)
        results = uvloop.run(run(config, parts, rows, models))
    except ValueError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # the outermost boundary of the process
        cause = first_error(error)
        log.error("%s: %s", type(cause).__name__, cause, exc_info=error)
        return 1
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(
            json.dumps({"data": str(config.data.eval), "problems": len(rows), "models": results}, indent=1) + "\n"
        )
    return 0


def arguments(argv: Sequence[str]) -> tuple[list[Path], Path | None, list[str]]:
    """Model folders, report, and the words for the config."""
    models: list[Path] = []
    out: Path | None = None
    rest: list[str] = []
    taking = ""
    for word in argv:
        if word in ("--models", "--out"):
            taking = word
        elif word.startswith("-"):
            rest, taking = [*rest, word], ""
        elif taking == "--models":
            models.append(Path(word))
        elif taking == "--out":
            out, taking = Path(word), ""
        else:
            rest.append(word)
    return models, out, rest


def wanted(config: Config, models: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows to answer. Raises ConfigError if there is nothing to judge, or nothing to judge it on."""
    if not models:
        raise ConfigError([f"--models: name one or more folders in Hugging Face format; {USAGE}"])
    if config.data.eval is None:
        raise ConfigError(["data.eval: null; name a file of problems that are kept out of training"])
    absent = [model for model in models if not (model / "config.json").is_file()]
    if absent:
        raise ConfigError(
            [f"--models {model}: no config.json there; name a folder in Hugging Face format" for model in absent]
        )
    problems = load_problems(config.data.eval, config.data)
    return [problems[index] for index in range(len(problems))]


async def run(config: Config, parts: Parts, rows: list[dict[str, Any]], models: Sequence[Path]) -> list[dict[str, Any]]:
    """Start an engine, judge each model, close the engine."""
    from rollout.engine.vllm_engine import Engine

    async with parts.rewards:
        engine = await Engine.start(config, config.run.seed)
        try:
            return await judge(config, parts, engine, rows, models)
        finally:
            await engine.close()


async def judge(
    config: Config, parts: Parts, engine: Judged, rows: list[dict[str, Any]], models: Sequence[Path]
) -> list[dict[str, Any]]:
    """One record a model, printed as it comes."""
    generate = sampler(engine, config.sampling.max_tokens, GREEDY, parts.prompts.stops)
    episodes = Episodes(parts.prompts, parts.task, generate, parts.rewards, 1)
    width = max(len(str(model)) for model in models)
    print(f"{'model':<{width}}  problems  reward  solved  failed", flush=True)
    results = []
    for model in models:
        await engine.load_folder(model)
        record = summary(str(model), await answers(episodes, rows, config.rollout.groups_in_flight), rows)
        numbers = f"{record['problems']:>8}  {record['reward']:>6.3f}  {record['solved']:>6.3f}  {record['failed']:>6}"
        print(f"{record['model']:<{width}}  {numbers}", flush=True)
        results.append(record)
    return results


async def answers(episodes: Episodes, rows: list[dict[str, Any]], at_once: int) -> list[Sample | str]:
    """A greedy answer to each row, or why there is none."""
    places = asyncio.Semaphore(at_once)

    async def answer(row: dict[str, Any]) -> Sample | str:
        failed = ""
        async with places:
            try:
                return (await episodes.play(row, 1))[0]
            except* (EpisodeError, RewardError) as errors:
                failed = str(first_error(errors))
        return failed

    async with asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(answer(row)) for row in rows]
    return [task.result() for task in playing]


def summary(model: str, outcomes: Sequence[Sample | str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean reward, share of rewards that are full (1 or more), and the first answers, for people and for the report.

    Failed problems count in neither mean: they are listed instead.
    """
    samples = [(row, outcome) for row, outcome in zip(rows, outcomes, strict=True) if isinstance(outcome, Sample)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
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
            {"problem": row, "answer": sample.answer, "reward": sample.reward} for row, sample in samples[:SHOWN]
        ],
    }
