"""Weights as safetensors files in a shared folder, for servers that no broadcast reaches. A version is written into a
temporary folder that is then renamed: a visible folder is complete. Frozen weights have a folder of their own."""

import asyncio
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configs.variables import apply_umask
from learner.weights.buckets import Buckets, DoubleBuffer, PublishedPolicy
from learner.weights.channel import ChannelError, in_thread
from learner.weights.sender.broadcast import whole_checksums
from learner.weights.sender.members import Member

KEPT = 2


class Files:
    """Takes the place of `broadcast.BroadcastGroup`."""

    backend, at_fault = "", False
    members: tuple[Member, ...] = ()

    def __init__(self, folder: Path, session: str) -> None:
        self._folder, self._session = folder.resolve(), session

    async def prepare(self, policy: PublishedPolicy, copies: DoubleBuffer, members: list[Member]) -> None:
        def run() -> None:
            with copies.reading(policy):
                self._write(policy)

        await in_thread(run, "weights-write")

    def give_up(self) -> None:
        """A server that still reads does no harm."""

    def source(self, policy: PublishedPolicy, member: Member) -> str:
        return str(self._path(policy))

    def send(self, policy: PublishedPolicy, copies: DoubleBuffer, digest: str) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def checksums(self, policy: PublishedPolicy, copies: DoubleBuffer, digest: str) -> asyncio.Future[list[int]]:
        return whole_checksums(policy, copies, digest)

    def _path(self, policy: PublishedPolicy) -> Path:
        return self._folder / f"v{policy.version:06d}-{self._session[:8]}"

    def _write(self, policy: PublishedPolicy) -> None:
        path, weights = self._path(policy), policy.weights
        assert isinstance(weights, Buckets)
        frozen = weights.plan.frozen
        try:
            if frozen:
                _write_buckets(weights, range(frozen), frozen_beside(path))
            _write_buckets(weights, range(frozen, len(weights.buckets)), path)
            self._prune(path)
        except (OSError, SafetensorError) as error:
            raise ChannelError(f"version {policy.version} could not be written: {error}") from None

    def _prune(self, newest: Path) -> None:
        ours = sorted(self._folder.glob(f"v*-{self._session[:8]}"), key=lambda path: path.stat().st_mtime)
        there = {path for kind in ("v*", ".v*", "frozen-*", ".frozen-*") for path in self._folder.glob(kind)}
        for old in there - {*ours[-KEPT:], newest, frozen_beside(newest)}:
            shutil.rmtree(old, ignore_errors=True)


def read(folder: Path, weights: Buckets, first: int) -> Iterator[int]:
    """Fill the buckets from `first` on; yields the index of each complete one. Raises ChannelError."""
    for bucket in range(first, len(weights.buckets)):
        weights.buckets[bucket].zero_()  # the padding counts in the checksum
        path = (frozen_beside(folder) if bucket < weights.plan.frozen else folder) / _file(bucket)
        try:
            with safe_open(path, "pt") as file:
                for name, tensor in weights.views(bucket):
                    tensor.copy_(file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise ChannelError(f"{path}: {error}; is the run's folder shared?") from None
        yield bucket


def frozen_beside(folder: Path) -> Path:
    """The folder of a version's frozen weights: `v000007-1a2b3c4d` -> `frozen-1a2b3c4d`"""
    return folder.with_name(f"frozen-{folder.name.rpartition('-')[2]}")


def _write_buckets(weights: Buckets, buckets: Iterable[int], path: Path) -> None:
    if path.is_dir():
        return
    partial = path.with_name(f".{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for bucket in buckets:
        save_file({name: tensor.cpu().clone() for name, tensor in weights.views(bucket)}, partial / _file(bucket))
    apply_umask(partial)  # servers may run as another user
    os.rename(partial, path)


def _file(bucket: int) -> str:
    return f"model-{bucket:05d}.safetensors"
