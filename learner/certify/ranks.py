"""Two ranks that shard a model: each computes half of the documents, and both compute the gradient.

An error of one rank ends both; the next question starts two others.
"""

import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from transformers.utils import logging as transformers_logging

from buffer.data.images import SeenImage
from configs.entrypoint import die_with_parent
from configs.load import ConfigError
from configs.schema import LearnerConfig, ModelConfig
from configs.variables import gloo_here
from learner.certify.images import shown_row
from learner.certify.numbers import gradients_of
from learner.model.exactness import FOREIGN, named
from learner.model.policy import Policy

RANKS = 2
LIMIT_S = 120.0
ENDING_S = 10.0
OPTIONS = LearnerConfig(
    gather="batch", activation_checkpointing="block", head_chunk_tokens=16, compile=False, share_prompts=False
)


class ComparedText(NamedTuple):
    tokens: np.ndarray
    weights: np.ndarray
    seen: Sequence[SeenImage] = ()


class Sharing(NamedTuple):
    """How the pieces of a shared row lie."""

    groups: Sequence[int] = ()
    copied: bool = False
    """Answers see copies of their prompt's keys."""


@dataclass
class Answer:
    """Log-probabilities, and on rank 0 summed gradients."""

    logprobs: list[np.ndarray] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    unmet: str = ""
    """Why the ranks did not meet."""
    error: str = ""


def how_ended(code: int) -> str:
    """Say how a process with this exit code ended. Example: `how_ended(-9) == "was ended by SIGKILL"`."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in {each.value for each in signal.Signals}
    return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"


class RankKilled(Exception):
    """The kernel kills processes when memory is short: no fault of the model."""

    def __str__(self) -> str:
        return f"a rank was killed by {signal.SIGKILL.name}"


class Pair:
    """Two ranks. Each process calls `prepare` first."""

    def __init__(self, context: BaseContext, prepare: Callable[[], None] = die_with_parent) -> None:
        self._context, self._prepare = context, prepare
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def start(self) -> None:
        """Fork before this process computes anything."""
        if self._ranks:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-ranks-")
        for rank in range(RANKS):
            ours, theirs = self._context.Pipe()
            target: Any = serve
            arguments = (theirs, rank, str(Path(self._folder.name) / "store"), self._prepare)
            process: BaseProcess = self._context.Process(target=target, args=arguments)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def ask(
        self, model: ModelConfig, shares: Sequence[Sequence[ComparedText]], sharing: Sharing | None = None
    ) -> list[Answer]:
        """What the ranks compute of their shares. `sharing`: both get the same row."""
        self.start()
        answers = []
        for (_, connection), share in zip(self._ranks, shares, strict=True):
            with suppress(OSError):  # a rank that has ended has left the reason
                connection.send((model.model_dump(), list(share), sharing))
        for process, connection in self._ranks:
            try:
                late = Answer(error=f"a rank gave no answer for {LIMIT_S:g} s")
                answers.append(connection.recv() if connection.poll(LIMIT_S) else late)
            except (EOFError, OSError):
                process.join(ENDING_S)
                if process.exitcode == -signal.SIGKILL:
                    raise RankKilled from None
                answers.append(Answer(error=f"the process of a rank {how_ended(process.exitcode or 0)}"))
        if any(answer.unmet or answer.error for answer in answers):
            self.close()
        return answers

    def close(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        if self._ranks:
            self._folder.cleanup()
        self._ranks = []

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def serve(connection: Connection, rank: int, store: str, prepare: Callable[[], None]) -> None:
    """Be a rank until the caller closes its end."""
    prepare()
    gloo_here()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # a fork must not use its parent's threads
    limit = timedelta(seconds=LIMIT_S / 2)
    try:
        dist.init_process_group("gloo", store=FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=limit)
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    except (RuntimeError, OSError) as error:
        connection.send(Answer(unmet=named(error)))
        return
    with suppress(EOFError):
        while True:
            model, documents, sharing = connection.recv()
            connection.send(_answer(ModelConfig.model_validate(model), documents, sharing, mesh))


def _answer(model: ModelConfig, documents: Sequence[ComparedText], sharing: Sharing | None, mesh: Any) -> Answer:
    try:
        learner = OPTIONS.model_copy(update={"context_parallel": RANKS if sharing else 1})
        policy, how = Policy(model, learner, mesh), sharing or Sharing()
        policy.sharing.most_copied = inf if how.copied else -1.0
        row = shown_row([each.tokens for each in documents], [each.seen for each in documents], how.groups)
        weights = torch.from_numpy(np.concatenate([each.weights for each in documents]))
        policy.gathering.reduce_after_next(last=True)
        with policy.gathering.held():
            got = policy(policy.place(row), 1.0)[0][row.scored]
            (got * weights).sum().backward()
        lengths = [len(each.weights) for each in documents]
        summed = {name: (RANKS * grad).numpy() for name, grad in gradients_of(policy).items()}
        parts = [part.numpy() for part in got.detach().split(lengths)]
        return Answer(parts, summed if dist.get_rank() == 0 else {})
    except (*FOREIGN, ConfigError) as error:
        return Answer(error=named(error))
