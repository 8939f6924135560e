"""`python -m learner CONFIG`: trains the policy of a run, from its last checkpoint to `run.versions`.

Other commands: `merge CHECKPOINT OUT` makes whole weights of a checkpoint with an adapter, `digest CHECKPOINT MODEL`
prints MODEL's digest, to compare with the base of CHECKPOINT, `sft CONFIG` trains on demonstrations.

The first SIGINT or SIGTERM ends the run after the current version and a checkpoint (exit 0), the second at once. Exit
2: bad input, found before training. Exit 1: a rank failed; all ranks have ended, and a restart continues from the last
checkpoint. Exit 3: the data ended before the last version. Exit 4: one of OVER.
"""
# ruff: noqa: E402

import gc

gc.disable()  # collections take a quarter of the imports' time
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from learner import first as first

# isort: split
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoTokenizer

from buffer.curve import client_keys_for, ready
from buffer.data.images import ImageFormat
from buffer.keys import ClientKeys, KeysError, load_server_keys
from buffer.wire.client import LearnerClient, RefusedError
from buffer.wire.protocol import Finished
from configs.checks import WEIGHTS, check, max_sample_tokens
from configs.critic import keeps_critic
from configs.entrypoint import (
    BAD_INPUT,
    DONE,
    ENDINGS,
    FAILED,
    GIVEN_UP,
    StopSignals,
    configure_logging,
    die_with_parent,
    run_and_exit,
)
from configs.load import ConfigError, read
from configs.origins import disclosed
from configs.plain_text import print_visible
from configs.publishing import choice, copies_over, publishes_rows
from configs.resume import fingerprint
from configs.schema import Config
from configs.start_phases import StartPhases
from learner import loop, ranks, watchdog
from learner.algorithms.losses import needs_entropy_gradient, needs_reference
from learner.algorithms.own import OwnFailure
from learner.algorithms.own_trial import check_own
from learner.certify import process
from learner.checkpoint import Checkpoints, NoDiskSpace
from learner.critic.critic import Critic
from learner.drain import Stopping
from learner.mesh import default_store, on_every_rank, process_group, replica, shards
from learner.model import flops, state
from learner.model.lora.base import Base
from learner.model.memory import OutOfMemory, explain_out_of_memory, gpu_memory
from learner.model.policy import Policy
from learner.model.settled import keeps_reference
from learner.record.metrics import Metrics
from learner.record.observer import Observer
from learner.record.trackers import Tracker
from learner.rehearsal import own_part
from learner.saved import base_digest, merge
from learner.sft import command
from learner.sft.beside import Beside, read_beside
from learner.sft.row_images import ImageChanged
from learner.sound import SoundSteps, bounds_of
from learner.starting import choose_device, configure_process, decide_budget, decide_gather, decide_speed, image_format
from learner.train import collectives
from learner.train.offload_trial import check_offload
from learner.train.optimizer import Optimizer
from learner.train.pictures import PictureMismatch, max_sample_patches, shown_row
from learner.train.routes import RouteMismatch
from learner.train.skipped import StepsSkipped
from learner.train.step import Algorithm
from learner.weights.probe import ProbeRow, placeholders, texts_of
from learner.weights.prober import rounding_of
from learner.weights.sender.mailbox import SendingRanks
from learner.weights.sender.publish import Bystander, Follower, Sender
from learner.weights.sender.row_rank import RowRank

gc.enable()
log = logging.getLogger("learner")
PROG = "python -m learner"
OVER = (ImageChanged, NoDiskSpace, OwnFailure, PictureMismatch, RouteMismatch, StepsSkipped)
"""Errors that a restart would only repeat."""
FILES = ("model.path", WEIGHTS, "data.demonstrations", "algorithm.loss", "algorithm.advantage")
OTHERS = {"merge": merge.main, "digest": base_digest.main, "sft": command.main}
LAST_PUBLISH_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    configure_logging(f"[{os.environ.get('RANK', '0')}]")
    if other := OTHERS.get(argv[0] if argv else ""):
        return other(argv[1:])
    config = read(argv, PROG, lambda config: check(config, files=FILES))
    phases = StartPhases("imports")
    try:
        os.environ.update(ranks.from_slurm(config.learner, os.environ))
        ranks.check_environment(config.learner, os.environ)
        device, form = choose_device(config), image_format(config)
        if process.leads(os.environ):
            process.require(config)
        else:
            process.checked(config.model, bool(config.learner.share_prompts))
        phases.end("certificate")
        for line in check_own(config.algorithm, config.sampling.max_tokens, config.rollout.task != "single_turn"):
            log.info("%s", line)
        if config.learner.ranks > 1 and "RANK" not in os.environ:
            return ranks.start(argv, config.learner)
        finished = train(config, device, phases, form)
    except (ConfigError, KeysError, RefusedError, OutOfMemory, process.NoCertificate, *OVER) as error:
        print_visible(f"{PROG}: {error}", sys.stderr)
        over = isinstance(error, OVER)
        return FAILED if isinstance(error, OutOfMemory | process.NoCertificate) else GIVEN_UP if over else BAD_INPUT
    if finished is None:
        return DONE
    if os.environ.get("RANK", "0") == "0":
        print_visible(f"{PROG}: {finished.why}", sys.stderr)
    return ENDINGS[finished.outcome]


def train(
    config: Config, device: torch.device, phases: StartPhases, form: ImageFormat | None = None
) -> Finished | None:
    """Run the loop; returns how it ended before the last version."""
    path, versions, prepared = config.run.path, config.run.versions, partial(prepare, config, device)
    with process_group(config, device, prepared) as (mesh, (device, buffer_keys)), ExitStack() as parts:
        rank, world = mesh.get_rank(), mesh.size()
        parts.enter_context(watchdog.Watchdog(config.learner.timeout_s, path / "logs"))
        check_offload(config.learner, mesh, device)
        patches = max_sample_patches(config, form) if form else 0
        config = decide_gather(decide_speed(config, gpu_memory(device), mesh, patches), device, mesh, patches)
        sends = copies_over(config, shards(mesh), rank)
        expected, budget = decide_budget(config, device, mesh, keeps_reference(config), sends, patches)
        parts.enter_context(explain_out_of_memory(expected, budget))
        beside = read_beside(config, budget)
        policy, algorithm = build(config, mesh, budget, form, beside)
        saved = path / "checkpoints", config.model, config.learner, algorithm.optimizer, versions, shards(mesh)
        checkpoints = Checkpoints(*saved, beside.position if beside else None, critic=algorithm.critic)
        checkpoints.ranks.check_folder()
        weights = on_every_rank(partial(open_weights_wire, config, policy, mesh, form))
        trackers = [
            Tracker(name, path, config.run.name, disclosed(config)) for name in config.log.trackers if rank == 0
        ]
        for tracker in trackers:
            parts.callback(tracker.close)
        peak = flops.peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        metrics = Metrics(path / "metrics.jsonl" if rank == 0 else None, trackers, peak=peak and peak * world)
        phases.end("model and optimizer")
        log.info("started in %s; waiting for the buffer at %s", phases, config.buffer.address)
        serves = weights.address if isinstance(weights, Sender) else None
        name, print_ = f"learner-{rank}", fingerprint(config)
        options: dict[str, Any] = {"keys": buffer_keys, "share_prompts": policy.sharing.whole_groups}
        sharing = config.learner.context_parallel  # ranks that train the same part
        part = rank // sharing, world // sharing
        batches = LearnerClient(config.buffer.address, name, print_, *part, serves, **options)
        parts.callback(batches.close)
        stopping = Stopping(batches)
        if rank == 0:
            gpus = world if device.type == "cuda" else 0
            parts.enter_context(Observer(config, buffer_keys, gpus, metrics.log_servers))
        with StopSignals(stopping.begin):
            bounds = bounds_of(policy, form, algorithm.teachers, config.teacher.top_k)
            trial = own_part(config, policy, budget, bounds.vocabulary, *part)
            sound = SoundSteps(algorithm, batches, bounds, trial)
            loop.run(policy, sound, batches, stopping, weights, checkpoints, metrics, versions)
        weights.close(LAST_PUBLISH_S) if isinstance(weights, Sender) else weights.close()
        checkpoints.close()
        metrics.close()
        if not stopping.begun:
            algorithm.skipped.check_end()
    return None if stopping.begun else batches.finished


def prepare(config: Config, device: torch.device) -> tuple[torch.device, ClientKeys]:
    """Configure the process; returns its device and its keys for the buffer. Raises ConfigError, KeysError."""
    return configure_process(config, device), client_keys_for(config.buffer.address, config.run.path, "learner")


def build(
    config: Config, mesh: DeviceMesh, budget: int, form: ImageFormat | None = None, beside: Beside | None = None
) -> tuple[Policy, Algorithm]:
    """Build the policy, and its algorithm with optimizer and, if the loss needs one, reference model."""
    temperature, entropy_gradient = config.sampling.temperature, needs_entropy_gradient(config.algorithm)
    seed, replay = config.run.seed, config.rollout.routing_replay
    policy = Policy(config.model, config.learner, mesh, temperature, entropy_gradient, seed=seed, replay=replay)
    reference: Policy | Base | None = None
    if keeps_reference(config):
        reference = Policy(config.model, config.learner, mesh, temperature, frozen=True)
    elif needs_reference(config.algorithm):
        reference = Base(policy)
    parameters = policy.model.num_parameters() / 1e6
    placed = f"{mesh.size()} x {policy.device}, attention {policy.attention}, {budget} tokens per microbatch"
    if mesh.ndim == 2:
        placed += f", {mesh.size(0)} copies over {mesh.size(1)} ranks each"
    log.info("%s: %.1f M parameters on %s", config.model.path, parameters, placed)
    state.report(policy.model, policy.device)
    critic = build_critic(config, mesh) if keeps_critic(config) else None
    held = config.algorithm.critic.warmup_versions if critic else 0
    optimizer = Optimizer(policy, config.learner, config.run.versions, held)
    teachers = {source: teacher.weight for source, teacher in config.teacher.teachers.items()}
    given = config.algorithm, optimizer, budget, config.sampling.max_tokens
    top_k = config.teacher.top_k is not None
    return policy, Algorithm(*given, reference, form, critic, beside, teachers, top_k)


def build_critic(config: Config, mesh: DeviceMesh) -> Critic:
    """Build the critic, a copy of the initial model with a value head, and its optimizer."""
    body = Policy(config.model, config.learner, mesh, valued=True)
    log.info("critic: %.1f M parameters, trained beside the policy", body.model.num_parameters() / 1e6)
    given = config.algorithm.critic
    own = config.learner.model_copy(update={"lr": given.learning_rate, "schedule": "constant", "warmup_versions": 0})
    return Critic(given, body, Optimizer(body, own, config.run.versions))


def open_weights_wire(
    config: Config, policy: Policy, mesh: DeviceMesh, form: ImageFormat | None
) -> Sender | RowRank | Follower | Bystander:
    """This rank's end of the weights wire. Raises ConfigError."""
    if replica(mesh) > 0:
        return Bystander()
    specs, seed, frozen = policy.weight_specs(), config.run.seed, policy.frozen_names()
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    embedding: Any = policy.model.get_input_embeddings()
    without = placeholders(policy.model.config.to_dict())
    texts = texts_of(tokenizer, max_sample_tokens(config) - 1, len(embedding.weight), form, without)
    row = shown_row([(text.tokens, text.images) for text in texts])
    probe = ProbeRow(texts, row, rounding_of(config))
    ranks = sending_ranks(policy, mesh) if publishes_rows(config, shards(mesh)) else None
    if mesh.get_rank() == 0 and (chosen := choice(config, shards(mesh))):
        log.info("%s", chosen)
    if mesh.get_rank() > 0:
        if ranks:
            return RowRank(specs, config.weights, seed, policy.device, ranks, probe, frozen)
        return Follower(specs, config.weights, seed, probe, frozen)
    check_weights_host(config.weights.host)
    keys = load_server_keys(ready(config.buffer.address, config.run.path), "learner")
    folder = config.run.path / "weights"
    return Sender(
        specs, config.weights, seed, policy.device, probe, folder=folder, frozen=frozen, ranks=ranks, keys=keys
    )


def sending_ranks(policy: Policy, mesh: DeviceMesh) -> SendingRanks:
    """The first replica's ranks, each of which sends its rows. Raises ConfigError if weights must be gathered."""
    if other := policy.unsent_by_rows():
        problem = f"weights.publish: rows, and the model's files hold {other} in another form or as a buffer"
        raise ConfigError([f"{problem}, which only gathered weights can be sent in; set it to gather"])
    group = mesh.get_group(mesh.ndim - 1)
    store, number = default_store("rows"), shards(mesh)
    agree = partial(collectives.broadcast_from_first, group=group)
    return SendingRanks(mesh.get_rank(), number, store, agree, policy.replicated_names())


def check_weights_host(host: str) -> None:
    """Raise ConfigError unless this machine can listen on `host`."""
    try:
        family = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host.strip("[]"), 0), family=family).close()
    except OSError as error:
        problem = f"weights.host: {host} is no address of {socket.gethostname()}, where learner rank 0 runs ({error})"
        raise ConfigError([f"{problem}; name one at which the rollout servers reach that machine"]) from None


if __name__ == "__main__":
    gc.freeze()  # what is imported stays
    die_with_parent()
    run_and_exit(main, log, is_rank=True)
