"""`python -m learner sft CONFIG`: supervised fine-tuning on the demonstrations of `data.train`, to `run.versions`.

Goes on from the last checkpoint. Signals and exit codes are those of `python -m learner`; exit 4: one of OVER.
"""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from buffer.store.lock import InUse, locked
from configs.architecture import unserved, usable_positions
from configs.checkpoint_files import complete
from configs.checks import check_sft
from configs.data.sources import count_rows
from configs.entrypoint import BAD_INPUT, DONE, FAILED, GIVEN_UP, StopSignals
from configs.load import ConfigError, read, write
from configs.origins import disclosed
from configs.plain_text import print_visible
from configs.resume import changes, written
from configs.schema import Config
from configs.sft import LOCK, longest
from configs.variables import run_folder
from configs.writing import writing
from learner import ranks, watchdog
from learner.certify import process
from learner.checkpoint import Checkpoints, NoDiskSpace
from learner.drain import Stopping
from learner.mesh import process_group, shards
from learner.model import flops, loading
from learner.model.memory import OutOfMemory, explain_out_of_memory, gpu_memory
from learner.model.policy import Policy
from learner.record.metrics import Metrics
from learner.record.trackers import Tracker
from learner.saved.manifest import DataPosition
from learner.sft import tuning
from learner.sft.answer_loss import AnswerSteps, HeldOut
from learner.sft.answers import reader_of
from learner.sft.demonstrations import Demonstrations, began_in, read_demonstrations
from learner.sft.row_images import ImageChanged
from learner.starting import choose_device, configure_process, decide_budget, decide_gather, decide_speed, image_format
from learner.train.offload_trial import check_offload
from learner.train.optimizer import Optimizer
from learner.train.skipped import StepsSkipped

log = logging.getLogger("learner")
PROG = "python -m learner sft"
UNSERVED = "model.path: %s is trained as transformers computes it; a run of reinforcement learning refuses it: %s"
OVER = (ImageChanged, NoDiskSpace, StepsSkipped)
"""Errors that a restart would only repeat."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. `argv` lacks the word `sft`."""
    config = read(argv, PROG, lambda config: check_sft(config, rows=count_rows(config.data.train)))
    try:
        os.environ.update(ranks.from_slurm(config.learner, os.environ))
        ranks.check_environment(config.learner, os.environ)
        device = choose_device(config)
        fitting = known(config)
        check_past(config)
        if process.leads(os.environ):
            for line in unserved(loading.read_config(config.model).to_dict()):
                log.warning(UNSERVED, config.model.path, line)
            process.require(config, prompts=False, served=False)
        else:
            process.checked(config.model, share=False, served=False)
        if config.learner.ranks > 1 and "RANK" not in os.environ:
            return ranks.start(["sft", *argv], config.learner)
        if os.environ.get("RANK", "0") == "0":
            take_folder(config.run.path)
        tune(config, fitting, device)
    except (ConfigError, OutOfMemory, process.NoCertificate, *OVER) as error:
        print_visible(f"{PROG}: {error}", sys.stderr)
        over = isinstance(error, OVER)
        return FAILED if isinstance(error, OutOfMemory | process.NoCertificate) else GIVEN_UP if over else BAD_INPUT
    return DONE


def known(config: Config) -> Config:
    """Bound `sft.max_tokens` by the model's positions. Raises ConfigError for a model that cannot be trained with
    images, though it reads some."""
    image_format(config)
    model = loading.read_config(config.model)
    positions = usable_positions(model.get_text_config().to_dict())
    if positions is None or config.sft.max_tokens != "auto" or longest(config) <= positions:
        return config
    return config.model_copy(update={"sft": config.sft.model_copy(update={"max_tokens": positions})})


def check_past(config: Config) -> None:
    """Raise ConfigError if keys have changed that may not, or another kind of run has the folder."""
    before = written(config.run.path)
    if before and (before.get("sft.rows") is None or complete(config.run.path / "checkpoints")):
        changes(before, config)


def take_folder(path: Path) -> None:
    """Lock the run's folder: two processes would write the same checkpoints. Raises ConfigError, WriteError."""
    try:
        with writing(path):
            run_folder(path)
            locked(path / LOCK)
    except InUse as error:
        raise ConfigError([f"run.name: {path} is {error}; end that, or choose another run.name"]) from None


def tune(given: Config, config: Config, device: torch.device) -> None:
    """Run the loop. `given`: what `config.yaml` records."""
    path, versions = config.run.path, config.run.versions
    prepare = partial(configure_process, config, device)
    with process_group(config, device, prepare) as (mesh, device), ExitStack() as parts:
        rank = mesh.get_rank()
        parts.enter_context(watchdog.Watchdog(config.learner.timeout_s, path / "logs"))
        data, held_out = read_all(config)
        check_offload(config.learner, mesh, device)
        config, patches = fitted(config, device, mesh, data, held_out)
        expected, budget = decide_budget(config, device, mesh, False, 0, patches)
        parts.enter_context(explain_out_of_memory(expected, budget))
        if rank == 0:
            write(given, path / "config.yaml")
        policy = Policy(config.model, config.learner, mesh, seed=config.run.seed)
        optimizer, rows = Optimizer(policy, config.learner, versions), config.sft.rows or 0
        saved = path / "checkpoints", config.model, config.learner, optimizer, versions, shards(mesh)
        digest, began = data.digest, data.began
        checkpoints = Checkpoints(*saved, lambda version: DataPosition(data=digest, rows=version * rows, began=began))
        checkpoints.ranks.check_folder()
        trackers = [
            Tracker(name, path, config.run.name, disclosed(config)) for name in config.log.trackers if rank == 0
        ]
        for tracker in trackers:
            parts.callback(tracker.close)
        peak = flops.peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        metrics = Metrics(path / "metrics.jsonl" if rank == 0 else None, trackers, peak=peak and peak * mesh.size())
        steps, stopping = AnswerSteps(data, optimizer, budget, rows), Stopping()
        measured = HeldOut(held_out, config.eval.every, versions, budget)
        with StopSignals(stopping.begin):
            tuning.run(policy, steps, measured, stopping, checkpoints, metrics, versions)
        checkpoints.close()
        metrics.close()
        steps.skipped.check_end()


def read_all(config: Config) -> tuple[Demonstrations, dict[str, Demonstrations]]:
    """Trained rows and held-out sets. Raises ConfigError. A collective."""
    reader = reader_of(config, began=began_in(config.run.path / "checkpoints"))
    try:
        found = {
            name: read_demonstrations(config, f"data.{name}", source, reader)
            for name, source in config.data.sources().items()
        }
    finally:
        reader.close()
    train = found.pop("train")
    if reader.prompts.form and all(data.images is None for data in (train, *found.values())):
        log.info("no row has images; model.text_alone: true saves the tower's memory and time")
    return train, {name.removeprefix("eval."): data for name, data in found.items()}


def fitted(
    config: Config, device: torch.device, mesh: DeviceMesh, data: Demonstrations, held_out: dict[str, Demonstrations]
) -> tuple[Config, int]:
    """Decide `auto` for the longest text, and for the most patches of one. Raises ConfigError. A collective."""
    check_sft(config, rows=len(data), files=())
    every = data, *held_out.values()
    most, patches = max(each.longest for each in every), max(each.patches for each in every)
    config = config.model_copy(update={"sft": config.sft.model_copy(update={"max_tokens": most})})
    return decide_gather(decide_speed(config, gpu_memory(device), mesh, patches), device, mesh, patches), patches
