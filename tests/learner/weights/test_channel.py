"""A broken group leaves nothing behind once its thread has ended.

Destroying a group may take seconds, which the garbage collector must not spend in a thread that runs an engine or an
event loop.
"""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from learner.weights.channel import Channel, ChannelError, in_thread

NAME = "a broken broadcast"


class Work:
    """Stands for a `dist.Work`, whose frames, in C++, hold no group."""

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError("the peer is gone")


class Broken:
    """A process group whose peer is dead."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        return Work()


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def a_channel() -> tuple[Channel, "weakref.ref[Broken]"]:
    channel, group = Channel("127.0.0.1", 1, 7, 0, 2, torch.device("cpu"), 1.0), Broken()
    channel._group = group
    return channel, weakref.ref(group)


def test_an_error_does_not_hold_the_group() -> None:
    channel, group = a_channel()
    with no_collection():
        with pytest.raises(ChannelError, match="group 7 of 2 ranks broke: the peer is gone") as raised:
            list(channel.broadcast([torch.zeros(1)]))
        channel._group = None
        assert raised.value.__traceback__ and group() is None


def test_a_thread_that_failed_leaves_no_garbage() -> None:
    async def test() -> None:
        channel, group = a_channel()
        future = in_thread(lambda: list(channel.broadcast([torch.zeros(1)])), NAME)
        with pytest.raises(ChannelError):
            await future
        channel._group = None
        del future
        for thread in threading.enumerate():
            if thread.name == NAME:
                thread.join(60.0)
        assert group() is None

    with no_collection():
        asyncio.run(test())
