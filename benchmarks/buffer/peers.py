"""What `__main__.py` compares with: bare pyzmq, Redis Streams, Ray's queue; and the groups that all of them move.

Each contender runs for some seconds and returns groups per second, or why it is absent. Waits for its sender.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks.runs.ports import free_port
from buffer.wire.message import Array
from buffer.wire.sample import Sample

SAMPLES, TOKENS, GROUPS = 8, 1000, 128
IN_FLIGHT = 32
"""Groups in flight per server."""


@cache
def arrays(version: int) -> dict[str, np.ndarray]:
    """The arrays of a sample of half prompt, half answer."""
    sampled = np.arange(TOKENS) >= TOKENS // 2
    return {
        "tokens": np.arange(TOKENS, dtype=np.int32),
        "sampled": sampled.astype(np.uint8),
        "behaviour_logprobs": np.where(sampled, -0.5, 0).astype(np.float32),
        "versions": np.where(sampled, version, -1).astype(np.int32),
    }


def group(version: int = 0) -> list[Sample]:
    """A group as a rollout server makes it."""
    return [
        Sample(
            tokens=Array.of(arrays(version)["tokens"]),
            sampled=Array.of(arrays(version)["sampled"]),
            behaviour_logprobs=Array.of(arrays(version)["behaviour_logprobs"]),
            versions=Array.of(arrays(version)["versions"]),
            reward=float(index),
            finish="stop",
            answer="x" * 2 * TOKENS,
        )
        for index in range(SAMPLES)
    ]


@cache
def packed(version: int = 0) -> list[bytes]:
    """The same, packed once, so that every contender is timed on moving and storing it."""
    return [sample.pack() for sample in group(version)]


BYTES = sum(map(len, packed()))


def on_this_disk() -> "tempfile.TemporaryDirectory[str]":
    """A temporary folder below `runs/`, which git ignores: the system's temporary folder may be in memory."""
    Path("runs").mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir="runs")


def bare_zmq(seconds: float) -> float:
    """The limit: the same bytes over one PUSH/PULL pair between two processes, nothing kept."""
    code = (
        "import sys, zmq\ns = zmq.Context().socket(zmq.PUSH)\ns.connect(sys.argv[1])\n"
        "b = bytes(int(sys.argv[2]))\nwhile 1: s.send(b)"
    )
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        address = f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}"
        sender = subprocess.Popen([sys.executable, "-c", code, address, str(BYTES)])
        try:
            return _rate(lambda: len(pull.recv()) // BYTES, seconds)
        finally:
            _end(sender)


REDIS_PRODUCER = """
import sys, redis
from benchmarks.buffer.peers import IN_FLIGHT, packed
client = redis.Redis(port=int(sys.argv[1]))
while True:
    pipeline = client.pipeline(transaction=False)
    for _ in range(IN_FLIGHT):
        pipeline.xadd("groups", {"group": b"".join(packed())})
    pipeline.execute()
"""


def redis_streams(seconds: float) -> float | str:
    """Each group is XADDed by one process, 32 at a time; read by another, 128 at a time, acknowledged and removed."""

    def take(client: Any) -> int:
        while not (found := client.xreadgroup("learner", "0", {"groups": ">"}, count=GROUPS, block=5000)):
            pass
        names = [name for name, _ in found[0][1]]
        client.pipeline(transaction=False).xack("groups", "learner", *names).xdel("groups", *names).execute()
        return len(names)

    return _redis(take, seconds)


def redis_read(seconds: float) -> float | str:
    """The same without consumer group, acknowledgement and deletion: groups can be lost, and memory only grows."""
    last = b"0"

    def take(client: Any) -> int:
        nonlocal last
        while not (found := client.xread({"groups": last}, count=GROUPS, block=5000)):
            pass
        last = found[0][1][-1][0]
        return len(found[0][1])

    return _redis(take, seconds)


def _redis(take: Callable[[Any], int], seconds: float) -> float | str:
    """Redis with an append-only file and fsync at each commit, as ours; one producer, `take` is the consumer."""
    server = shutil.which("redis-server")
    if not server:
        return "absent: no redis-server on PATH (Debian: redis-server)"
    try:
        import redis
    except ImportError:
        return "absent: no redis-py"
    port = free_port()
    with on_this_disk() as folder, ExitStack() as ends:
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", folder]
        running = subprocess.Popen([server, "--port", str(port), *durable], stdout=subprocess.DEVNULL)
        ends.callback(_end, running)
        patient = redis.retry.Retry(redis.backoff.ConstantBackoff(0.1), 50)
        client = ends.enter_context(redis.Redis(port=port, retry=patient))
        client.xgroup_create("groups", "learner", mkstream=True)
        ends.callback(_end, subprocess.Popen([sys.executable, "-c", REDIS_PRODUCER, str(port)]))
        return _rate(lambda: take(client), seconds)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def ray_queue(seconds: float) -> float | str:
    """`ray.util.queue.Queue`: an actor holds the groups, nothing is durable."""
    try:
        import ray
        from ray.util.queue import Queue
    except ImportError:
        return "absent: no ray"
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        queue = Queue(maxsize=64)

        @ray.remote(num_cpus=0)
        def send() -> None:
            while True:
                queue.put(packed())

        task = send.remote()
        rate = _rate(lambda: len(queue.get()) // SAMPLES, seconds)
        ray.cancel(task, force=True)
        return rate
    finally:
        ray.shutdown()


def _rate(take: Callable[[], int], seconds: float) -> float:
    """Groups per second; `take` returns how many it took."""
    take()
    began, number = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        number += take()
    return number / (time.monotonic() - began)
