"""`python -m learner CONFIG`: trains the policy of a run, from its last checkpoint to `run.versions`.

Starts `learner.ranks` ranks on this machine unless torchrun has started them; builds the parts of `learner.loop` and
runs it. Waits for the buffer, and through it for batches. The first SIGINT or SIGTERM ends it after the version in work
and a checkpoint (exit 0), the second at once. Exit 2: something is wrong with config, model or device, found before
anything was started. Exit 1: a rank failed; all have ended, and starting again goes on from the last checkpoint.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from buffer.wire.client import LearnerClient, RefusedError
from buffer.wire.curve import ClientKeys, KeysError, client_keys_for, server_keys_for
from configs import load
from configs.checks import check
from configs.schema import Config
from learner import loop, ranks, watchdog
from learner.algorithms import needs_entropy_gradient, needs_reference
from learner.checkpoint import Checkpoints, NoDiskSpace, Rewarded
from learner.drain import Draining
from learner.metrics import Metrics
from learner.model import attention, flops, memory
from learner.model.policy import Policy
from learner.trackers import Tracker
from learner.train.optimizer import Optimizer
from learner.train.step import Algorithm
from learner.weights.probe import tokens_of
from learner.weights.sender.publish import Follower, Sender

log = logging.getLogger("learner")
PROG = "python -m learner"
FILES = ("model.path",)
AUTO_TOKENS = 8192
LAST_POLICY_S = 10.0
"""What the servers get at the end to take the last policy."""


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`; returns the exit code."""
    ranks.die_with_parent()
    rank = os.environ.get("RANK", "0")
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)  # torch's checkpoint logger lets DEBUG through, whatever the root logger says
    line = f"%(asctime)s %(levelname)s %(name)s[{rank}]: %(message)s"
    logging.basicConfig(format=line, level=logging.INFO, handlers=[handler])
    config = load.read(argv, PROG, lambda config: check(config, files=FILES))
    try:
        device = device_of(config)
        if config.learner.ranks > 1 and "RANK" not in os.environ:
            return ranks.start(argv, config.learner.ranks)
        train(config, device)
    except (load.ConfigError, KeysError, RefusedError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except (NoDiskSpace, memory.OutOfMemory) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    return 0


def device_of(config: Config) -> torch.device:
    """The kind of device the ranks run on. Raises ConfigError where it, the attention or the model does not do."""
    learner, seen = config.learner, torch.cuda.device_count()
    device = torch.device("cuda" if learner.device == "cuda" or (learner.device == "auto" and seen) else "cpu")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", learner.ranks))
    if device.type == "cuda" and seen < local:
        problem = (
            f"learner.ranks: {local} ranks need {local} GPUs, {seen} are seen; lower it, or set learner.device: cpu"
        )
        raise load.ConfigError([problem])
    check_attention(config, device)
    try:
        AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except (ValueError, OSError) as error:
        raise load.ConfigError([f"model.path: {config.model.path}: {str(error).splitlines()[0]}"]) from None
    return device


def check_attention(config: Config, device: torch.device) -> None:
    """Raises ConfigError where `learner.attention` does not work on `device`."""
    try:
        attention.choose(config.learner.attention, device, getattr(torch, config.model.dtype))
    except ValueError as error:
        raise load.ConfigError([str(error)]) from None


def train(config: Config, device: torch.device) -> None:
    """Build the parts, run the loop, end in order."""
    settle(config, device)
    if device.type == "cuda":
        check_attention(config, torch.device("cuda", torch.cuda.current_device()))
    path, versions = config.run.path, config.run.versions
    buffer_keys = client_keys_for(config.buffer.address, path)
    with process_group(config, device) as mesh, ExitStack() as parts:
        rank, world = dist.get_rank(), dist.get_world_size()
        first = rank == 0
        parts.enter_context(watchdog.Watchdog(config.learner.timeout_s, path / "logs"))
        expected, budget = room(config, device, world)
        parts.enter_context(memory.explained(expected, budget))
        policy, algorithm = build(config, mesh, budget)
        checkpoints = Checkpoints(path / "checkpoints", config.model, config.learner, algorithm.optimizer, versions)
        wire = weights(config, policy, first)
        trackers = track(config) if first else []
        metrics = Metrics(path / "metrics.jsonl" if first else None, trackers, peak=peak(device, world))
        serves = wire.address if isinstance(wire, Sender) else None
        batches = connect(config, rank, world, serves, buffer_keys)
        parts.callback(batches.close)
        with Draining(batches) as draining:
            loop.run(policy, Rewarded(algorithm, checkpoints), draining, wire, checkpoints, metrics, versions)
        for tracker in trackers:
            tracker.close()
        wire.close(LAST_POLICY_S) if isinstance(wire, Sender) else wire.close()
        checkpoints.close()


def settle(config: Config, device: torch.device) -> None:
    """What holds for the whole process: threads, seed, device, quiet libraries."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = config.learner.threads or (max(torch.get_num_threads() // local, 1) if device.type == "cpu" else None)
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(config.run.seed)
    if device.type == "cuda":
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # microbatches differ in length
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def process_group(config: Config, device: torch.device) -> Iterator[DeviceMesh]:
    """The ranks, met; gloo beside NCCL, for words between CPUs. Torn down in good order only: a failed rank exits."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.learner.timeout_s + watchdog.LATER_S)
    watchdog.record()
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    yield init_device_mesh(device.type, (dist.get_world_size(),))
    dist.destroy_process_group()


def room(config: Config, device: torch.device, world: int) -> tuple[memory.Estimate, int]:
    """The memory a rank will take and the tokens of its microbatches, said before anything is loaded.

    Raises ConfigError where a GPU cannot hold them.
    """
    longest, wanted = config.data.max_prompt_tokens + config.sampling.max_tokens, config.learner.tokens_per_microbatch
    expected = memory.estimate(config.model, config.learner, world, needs_reference(config.algorithm))
    if device.type != "cuda":
        return expected, max(AUTO_TOKENS, longest) if wanted == "auto" else wanted
    whole = torch.cuda.get_device_properties(device).total_memory
    budget = expected.fit(int(memory.SHARE * whole)) if wanted == "auto" else wanted
    words = expected.words(max(budget, longest))
    log.info("%d tokens a microbatch: a rank takes %s of %.1f GiB", budget, words, whole / memory.GIB)
    if budget < longest or expected.total(budget) > whole:
        problem = f"learner.tokens_per_microbatch: {wanted}: a sample of {longest} tokens takes {words}, a GPU has "
        remedy = "set learner.activation_checkpointing: block or learner.cpu_offload, or raise learner.ranks"
        raise load.ConfigError([f"{problem}{whole / memory.GIB:.1f} GiB; {remedy}"])
    return expected, budget


def peak(device: torch.device, world: int) -> float | None:
    """FLOP/s of all the ranks' GPUs by datasheet, where known."""
    one = flops.peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return one and one * world


def build(config: Config, mesh: DeviceMesh, budget: int) -> tuple[Policy, Algorithm]:
    """The policy, and its algorithm with optimizer and, where the loss wants one, reference model."""
    temperature, bonus = config.sampling.temperature, needs_entropy_gradient(config.algorithm)
    policy = Policy(config.model, config.learner, mesh, temperature, entropy_gradient=bonus)
    reference = None
    if needs_reference(config.algorithm):
        reference = Policy(config.model, config.learner, mesh, temperature, frozen=True)
    log.info(
        "%s: %.1f M parameters on %d x %s, attention %s, %d tokens a microbatch",
        config.model.path, policy.model.num_parameters() / 1e6, mesh.size(), policy.device, policy.attention, budget,
    )  # fmt: skip
    optimizer = Optimizer(policy, config.learner, config.run.versions)
    return policy, Algorithm(config.algorithm, optimizer, budget, config.sampling.max_tokens, reference)


def track(config: Config) -> list[Tracker]:
    """The trackers the config asks for, starting."""
    told = config.model_dump(mode="json")
    return [Tracker(name, config.run.path, config.run.name, told) for name in config.log.trackers]


def weights(config: Config, policy: Policy, first: bool) -> Sender | Follower:
    """This rank's end of the weights wire."""
    specs, seed = policy.weight_specs(), config.run.seed
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    probe = tokens_of(tokenizer, config.data.max_prompt_tokens + config.sampling.max_tokens - 1)
    if not first:
        return Follower(specs, config.weights, seed, probe)
    keys = server_keys_for(f"tcp://{config.weights.host}:0", config.run.path)
    folder = config.run.path / "weights"
    return Sender(specs, config.weights, seed, policy.device, probe, keys, folder=folder)


def connect(config: Config, rank: int, world: int, serves: str | None, keys: ClientKeys | None) -> LearnerClient:
    """This rank's end of the samples wire; only rank 0 tells where policies are served."""
    log.info("waiting for the buffer at %s", config.buffer.address)
    return LearnerClient(
        config.buffer.address, f"learner-{rank}", load.fingerprint(config), rank, world, serves, keys=keys
    )


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    except Exception:  # the outermost boundary
        log.critical("the learner failed", exc_info=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever threads still hang in: other ranks wait to see this one end
