"""`python -m rollout evaluate CONFIG --models DIR [DIR ...] [--sets NAME ...] [--out FILE.json]`: on `data.eval`.

One vLLM engine loads one folder after another. Needs neither buffer nor learner.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from configs.entrypoint import DONE, split_flags, without_collections
from configs.flow.sequences import max_sequences
from configs.load import ConfigError, read
from configs.model_folder import faults
from configs.plain_text import print_visible
from configs.schema import Config
from configs.variables import unwritable
from configs.writing import write_text
from rollout.concurrency import Places, SparePlaces
from rollout.engine.arguments import on_cpu
from rollout.engine.early_process import EarlyProcess
from rollout.episodes.setup import RolloutSetup, check_scored, check_server
from rollout.evaluation.players import Played, ProblemSet, load_sets, play

if TYPE_CHECKING:
    from rollout.engine.vllm_engine import Engine

PROG = "python -m rollout evaluate"
SHOWN = 2
FLAGS: dict[str, dict[str, Any]] = {
    "models": {"nargs": "+", "type": Path, "action": "extend", "default": []},
    "sets": {"nargs": "+", "action": "extend", "default": []},
    "out": {"type": Path},
}
FLAGS_SHOWN = "--models DIR [DIR ...] [--sets NAME ...] [--out FILE.json]"
USAGE = f"usage: {PROG} RUN.yaml [MORE.yaml ...] {FLAGS_SHOWN} [--section.key=value ...]"


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`. Raises ValueError."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    flags, rest = split_flags(argv, PROG, **FLAGS)
    config = read(rest, f"{PROG} {FLAGS_SHOWN}", check_evaluated)
    sets = chosen_sets(config, flags.models, flags.sets)
    if flags.out:
        with suppress(OSError):
            flags.out.parent.mkdir(parents=True, exist_ok=True)
        if why := unwritable(flags.out):
            raise ConfigError([f"--out: {flags.out}: {why}"])
    count = len(flags.models)
    say(f"starts vLLM for {count} model{'s' * (count > 1)}, which may take a minute or two")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    config = served(config, flags.models)
    with EarlyProcess.of(config) or nullcontext() as early:
        results = uvloop.run(evaluate(config, RolloutSetup.load(config, "evaluate"), sets, flags.models, early))
    if flags.out:
        data: Any = {each.name: str(each.given.path) for each in sets}
        report = {
            "data": data["eval"] if list(data) == ["eval"] else data,
            "problems": sum(len(each.rows) for each in sets),
            "models": results,
        }
        write_text(flags.out, json.dumps(report, indent=1) + "\n")
    return DONE


def say(line: str) -> None:
    """Print on stderr: stdout has only the table."""
    print_visible(f"evaluate: {line}", sys.stderr)


def check_evaluated(config: Config) -> None:
    """Raise ConfigError if models cannot be evaluated."""
    check_server(config, files=["data.eval"])
    check_scored(config)


def chosen_sets(config: Config, models: Sequence[Path], names: Sequence[str] = ()) -> list[ProblemSet]:
    """Return the sets called `names`, or all. Raises ConfigError."""
    if not models:
        raise ConfigError([f"--models: name one or more folders in Hugging Face format; {USAGE}"])
    if not config.data.eval:
        raise ConfigError(["data.eval: null; name a file of problems that are kept out of training"])
    if problems := [f"--models {model}: {why}" for model in models if (why := absence(model))]:
        raise ConfigError(problems)
    known = ", ".join(config.data.eval)
    if unknown := [f"--sets {name}: data.eval has {known}" for name in names if name not in config.data.eval]:
        raise ConfigError(unknown)
    wanted = {name: given for name, given in config.data.eval.items() if name in names or not names}
    return load_sets(config.model_copy(update={"data": config.data.model_copy(update={"eval": wanted})}))


def absence(folder: Path) -> str:
    """Return why `folder` cannot be evaluated, or ""."""
    if (folder / "adapter_config.json").is_file():
        return ""
    if (folder / "config.json").is_file():
        return next(faults(folder), "")
    if inside := [folder / name for name in ("adapter", "huggingface") if (folder / name).is_dir()]:
        return f"a checkpoint; name {inside[0]}"
    return "no config.json there; name a folder in Hugging Face format, or an adapter's in PEFT's"


def served(config: Config, models: Sequence[Path]) -> Config:
    """Return `config` for an engine that serves `models`. Raises ValueError."""
    from rollout.engine.lora.adapter_folder import evaluated_as  # takes seconds

    return evaluated_as(config, models)


async def evaluate(
    config: Config,
    setup: RolloutSetup,
    sets: Sequence[ProblemSet],
    models: Sequence[Path],
    early: EarlyProcess | None = None,
) -> list[dict[str, Any]]:
    with without_collections():
        from rollout.engine.vllm_engine import Engine

    async with setup:
        engine = await Engine.start(config, config.run.seed, early)
        try:
            return await evaluate_models(config, setup, engine, sets, models)
        finally:
            await engine.close()


async def evaluate_models(
    config: Config, setup: RolloutSetup, engine: "Engine", sets: Sequence[ProblemSet], models: Sequence[Path]
) -> list[dict[str, Any]]:
    """Return one record for each model and set, printed as soon as it is known."""
    at_once = config.rollout.sequences
    places = Places(max_sequences(config, on_cpu(config)) if at_once == "auto" else at_once, samples=1)
    table = Table(sets, models)
    results = []
    for model in models:
        say(f"loads {model}, which answers {sum(len(each.rows) for each in sets):,} problems")
        await engine.load_folder(model)
        for problems in sets:
            episodes = problems.episodes(config, setup, engine)
            played = await play(problems, episodes, SparePlaces(places, share=1.0), SHOWN)
            results.append(record_of(str(model), problems, played))
            table.show(results[-1])
    return results


def record_of(model: str, problems: ProblemSet, played: Played) -> dict[str, Any]:
    samples, figures = problems.given.samples, dict(played.figures)
    counts = {name: int(figures.pop(name)) for name in ("problems", "failed")}
    return {
        "model": model,
        "set": problems.name,
        "problems": counts["problems"],
        "samples": samples,
        "reward": figures.pop("reward", 0.0),
        "solved": figures.get(f"mean@{samples}", 0.0),
        "length": figures.pop("length", 0.0),
        "failed": counts["failed"],
        "reasons": played.reasons,
        **figures,
        "examples": played.examples,
    }


class Table:
    """Prints a line for each record."""

    def __init__(self, sets: Sequence[ProblemSet], models: Sequence[Path]) -> None:
        self._model = max(len(str(model)) for model in models)
        self._set = max(len("set"), *(len(each.name) for each in sets)) if [s.name for s in sets] != ["eval"] else 0
        self._more = list(dict.fromkeys(self._estimates(sets)))
        head = [f"{'model':<{self._model}}", *([f"{'set':<{self._set}}"] if self._set else []), "problems"]
        print_visible("  ".join([*head, "reward", "solved", "failed", *(f"{name:>7}" for name in self._more)]))

    @staticmethod
    def _estimates(sets: Sequence[ProblemSet]) -> Iterator[str]:
        for each in sets:
            for k in sorted(each.given.k):
                yield from (f"pass@{k}", f"pass^{k}") if k > 1 else ("pass@1",)

    def show(self, record: dict[str, Any]) -> None:
        name = [f"{record['model']:<{self._model}}", *([f"{record['set']:<{self._set}}"] if self._set else [])]
        numbers = f"{record['problems']:>8}  {record['reward']:>6.3f}  {record['solved']:>6.3f}  {record['failed']:>6}"
        more = [f"{record[key]:>7.3f}" if key in record else f"{'':>7}" for key in self._more]
        print_visible("  ".join([*name, numbers, *more]).rstrip())
