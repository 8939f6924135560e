"""Weights as safetensors files in a folder that learner and servers share: the wire for where no broadcast reaches.

The learner's background thread writes an edition once, a file a bucket, under a temporary name and then renames the
folder: what is there is whole. Workers read it bucket by bucket and compare the same checksums as after a broadcast.
`Files` stands in for `group.Group` in `rounds.Rounds`. The two newest editions stay; a newcomer reads the newest.
"""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from learner.weights.buckets import Buckets
from learner.weights.channel import ChannelError, in_thread
from learner.weights.protocol import Go
from learner.weights.sender.members import Member
from learner.weights.sender.shelf import DoubleBuffer, PublishedPolicy

KEPT = 2


class Files:
    """Editions in `folder`, for `members`."""

    backend = ""
    """Servers may receive with whatever they have."""

    def __init__(self, folder: Path, session: str, timeout_s: float) -> None:
        self.members: list[Member] = []
        self._folder, self._session, self._timeout_s = folder.resolve(), session, timeout_s

    def form(self, members: list[Member]) -> None:
        """They are served now."""
        self.members = members

    def give_up(self) -> None:
        """Nothing to undo: who reads on harms nobody."""
        self.members = []

    def go(self, member: Member, round: int, session: str, edition: PublishedPolicy) -> Go:
        """What `member` needs to know to read `edition`."""
        return Go(
            round=round, session=session, version=edition.version, epoch=0, offset=0, world=1, backend="", host="",
            port=0, timeout_s=self._timeout_s, folder=str(self._path(edition)), checksums=edition.checksums,
            probe=edition.probe,
        )  # fmt: skip

    def prepare(self, edition: PublishedPolicy, shelf: DoubleBuffer) -> "asyncio.Future[None]":
        """Write `edition` in a thread unless it is there. Raises ChannelError if the disk does not take it."""

        def run() -> None:
            with shelf.hold(edition):
                self._write(edition)

        return in_thread(run, "weights-write")

    def send(self, edition: PublishedPolicy, shelf: DoubleBuffer) -> "asyncio.Future[None]":
        """Nothing is left to do: each reads for itself."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _path(self, edition: PublishedPolicy) -> Path:
        return self._folder / f"v{edition.version:06d}-{self._session[:8]}"

    def _write(self, edition: PublishedPolicy) -> None:
        path = self._path(edition)
        if path.is_dir():
            return
        try:
            growing = self._folder / f".{path.name}"
            shutil.rmtree(growing, ignore_errors=True)
            growing.mkdir(parents=True)
            snapshot = edition.snapshot
            for bucket in range(len(snapshot.buckets)):
                tensors = {name: tensor.cpu().clone() for name, tensor in snapshot.views_of(bucket)}
                save_file(tensors, growing / _file(bucket))
            os.rename(growing, path)
            self._prune(path)
        except (OSError, SafetensorError) as error:
            raise ChannelError(f"version {edition.version} could not be written: {error}") from None

    def _prune(self, newest: Path) -> None:
        ours = sorted(self._folder.glob(f"v*-{self._session[:8]}"), key=lambda path: path.stat().st_mtime)
        for old in {*self._folder.glob("v*"), *self._folder.glob(".v*")} - {*ours[-KEPT:], newest}:
            shutil.rmtree(old, ignore_errors=True)


def read(folder: Path, snapshot: Buckets) -> Iterator[int]:
    """Fill `snapshot`; yields each bucket's index as soon as it is there. Raises ChannelError."""
    for bucket in range(len(snapshot.buckets)):
        snapshot.buckets[bucket].zero_()  # between tensors, too, all is as at the learner
        try:
            with safe_open(folder / _file(bucket), "pt") as file:
                for name, tensor in snapshot.views_of(bucket):
                    tensor.copy_(file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise ChannelError(f"{folder / _file(bucket)}: {error}; is the run's folder shared?") from None
        yield bucket


def _file(bucket: int) -> str:
    return f"model-{bucket:05d}.safetensors"
