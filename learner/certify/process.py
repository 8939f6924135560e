"""Has a certificate made in forked processes, and keeps it in the run's folder.

Call it before this process computes with torch: a forked process must not find a pool of threads.
"""

import json
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.utils import logging as transformers_logging

from configs.certificate import FILE, Certificate, read, write
from configs.entrypoint import PARENT, die_with_parent
from configs.load import ConfigError
from configs.schema import Config, ModelConfig
from configs.variables import gloo_here, run_folder
from configs.writing import full_disk, writing
from learner.certify.certifier import certify, key_of
from learner.certify.ranks import Pair, RankKilled, how_ended
from learner.model import loading, state
from learner.model.exactness import REMEDY, check_adapter, check_exact, check_shareable, named

log = logging.getLogger(__name__)
LIMIT_S = 600.0
ENDING_S = 10.0
MEMORY = ("can't allocate memory", "not enough memory")
"""In torch's errors of a CPU without memory."""


class NoCertificate(RuntimeError):
    """The process that makes a certificate has ended, or takes too long."""


def leads(environment: Mapping[str, str]) -> bool:
    """Whether this process, of all ranks and nodes, needs a certificate."""
    return all(environment.get(name, "0") == "0" for name in ("RANK", "NODE_RANK"))


def require(config: Config, prompts: bool = True, served: bool = True) -> None:
    """Raise ConfigError unless the run's model has a certificate that holds, and takes its adapter. `prompts`: rows may
    share them. `served`: beside servers, which must compute the same."""
    model, file = config.model, config.run.path / FILE
    facts, learner = loading.read_config(model), config.learner
    share, splits = prompts and bool(learner.share_prompts), learner.context_parallel > 1
    check_shareable(model, config.learner.context_parallel)
    key = key_of(facts, share, model.trust_remote_code, splits, served)
    found = read(file)
    if found is None or found.key != key or not found.holds:
        log.info("certificate: compares a small copy of the model with transformers, which may take a minute")
        found = made(model, share, splits=splits, served=served)
        with writing(config.run.path):
            run_folder(config.run.path)
        write(found, file)
        for check in found.checks:
            what, figure, limit, verdict, why = check.cells()
            shown = [f"{figure} (limit {limit})" if figure else "", verdict, why]
            log.info("certificate: %s: %s", what, ", ".join(filter(None, shown)))
    log.info("%s", found.summary())
    if found.faults:
        raise ConfigError([f"model.path: {model.path} ({found.kind}): {line}" for line in found.faults])
    check_adapter(model, facts)


def made(
    model: ModelConfig, share: bool, splits: bool = False, served: bool = True, limit_s: float = LIMIT_S
) -> Certificate:
    loading.read_config(model)
    return Certificate.model_validate_json(_forked(_make, model, (share, splits, served), limit_s))


def checked(model: ModelConfig, share: bool, served: bool = True, limit_s: float = LIMIT_S) -> None:
    """Do `check_exact` in its own process."""
    if problems := json.loads(_forked(_check, model, (share, served), limit_s)):
        raise ConfigError(problems)


def _forked(target: Callable[..., str], model: ModelConfig, given: tuple[bool, ...], limit_s: float) -> str:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, os.getpid(), target, model, given), name="certify")
    process.start()
    theirs.close()
    try:
        found: tuple[str, str, str] | None = ours.recv() if ours.poll(limit_s) else None
        code = None
    except EOFError:
        found = None
        process.join(ENDING_S)
        code = process.exitcode
    finally:
        process.kill()
        process.join()
        ours.close()
    if found is None:
        raise NoCertificate(f"model.path: {model.path}: {_end(code, limit_s)}")
    answer, problem, short = found
    if short:
        raise NoCertificate(f"model.path: {model.path}: {short}")
    if problem:
        raise ConfigError([f"model.path: {model.path}: it cannot be tried ({problem}); {REMEDY}"])
    return answer


def _end(code: int | None, limit_s: float) -> str:
    """Say how the process ended that gave no certificate. `code`: its exit code; None: it took too long."""
    if code is None:
        return f"its certificate was not made in {limit_s:g} s; start again on a machine that is less busy"
    memory = ", as the kernel does when memory is short; free memory, or allow the job more" * (-code == signal.SIGKILL)
    return f"the process that makes its certificate {how_ended(code)}{memory}"


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """Yield the mesh of a temporary process group of one rank."""
    gloo_here()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=LIMIT_S))
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


def prepare() -> None:
    """End with the parent, which alone takes Ctrl-C; compute without kernels."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    state.use_torch_alone()


def _answer(
    connection: Connection, parent: int, target: Callable[..., str], model: ModelConfig, given: tuple[bool, ...]
) -> None:
    os.environ[PARENT] = str(parent)
    prepare()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.getLogger("learner.model").setLevel(logging.ERROR)  # the run's own policy warns of the same
    try:
        connection.send((target(model, *given), "", ""))
    except Exception as error:  # of transformers' code, which this process alone runs
        connection.send(("", named(error), _short(error)))


def _short(error: Exception) -> str:
    """What the machine lacks, with the remedy; "" where the model is at fault."""
    if isinstance(error, MemoryError | RankKilled) or any(words in str(error) for words in MEMORY):
        return f"memory is short while its certificate is made ({named(error)}); free memory"
    if full := full_disk(error, tempfile.gettempdir()):
        is_copy = Path(full.filename).is_relative_to(tempfile.gettempdir())
        what, other = ("the small copy", ", or name another folder by TMPDIR") if is_copy else ("a file", "")
        return f"{what} for its certificate cannot be written: {full}{other}"
    return ""


def _make(model: ModelConfig, share: bool, splits: bool, served: bool) -> str:
    with Pair(multiprocessing.get_context("fork"), prepare) as pair:
        pair.start()
        with one_rank() as mesh:
            return certify(model, share, mesh, pair, splits, served).model_dump_json()


def _check(model: ModelConfig, share: bool, served: bool) -> str:
    try:
        check_exact(model, share, served)
    except ConfigError as error:
        return json.dumps(error.problems)
    return "[]"
