"""Throughput and latency of samples through the buffer, from Put to Take, durable: against Redis Streams, Ray's queue
and bare pyzmq.

`python -m benchmarks.buffer [--seconds 10] [--only ours,zmq,redis,ray,latency,open,clients,tcp]` prints one table and
writes `benchmarks/results/buffer.json` and `buffer.png`. Clients use the buffer's Unix socket, as on one machine;
`tcp` measures loopback with CURVE. Groups of 8 samples of 1,000 tokens; every contender moves the same bytes. A
contender that is not installed is reported as absent.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import uvloop
import zmq

from benchmarks.buffer.clients import GroupTraffic
from benchmarks.buffer.peers import (
    GROUPS,
    SAMPLES,
    TOKENS,
    bare_zmq,
    on_this_disk,
    packed,
    ray_queue,
    redis_read,
    redis_streams,
)
from benchmarks.runs.ports import free_port
from buffer.curve import LOCAL
from buffer.keys import load_client_keys, make_keys
from buffer.wire.client import Connection, RolloutClient
from buffer.wire.protocol import Put, Stored, WorkItem
from configs.load import load
from configs.resume import fingerprint

RESULTS = Path(__file__).parents[1] / "results"
ROUNDS = 3


# ours


@contextmanager
def buffer(max_staleness: int = 4, groups: int = GROUPS, tcp: bool = False) -> Iterator[tuple[str, str, Path]]:
    """`python -m buffer` on a file of its own, with fsync; gives (address, fingerprint, folder of the keys)."""
    with on_this_disk() as folder:
        rows = "".join(json.dumps({"problem": f"problem {row}", "answer": str(row)}) + "\n" for row in range(4096))
        Path(folder, "train.jsonl").write_text(rows)
        address = f"tcp://127.0.0.1:{free_port()}" if tcp else LOCAL
        keys = make_keys(Path(folder, "benchmark", "keys"))
        sections = {
            "run": {"name": "benchmark", "folder": folder, "versions": 10**6},
            "model": {"path": "none"},
            "data": {"train": f"{folder}/train.jsonl"},
            "reward": {"function": "math"},
            "batch": {"groups": groups, "samples": SAMPLES, "max_staleness": max_staleness},
            "buffer": {"address": address, "fsync": True, "max_gib": 1e4, "max_message_mib": 4096},
        }
        config = Path(folder, "run.yaml")
        config.write_text(json.dumps(sections))
        running = subprocess.Popen([sys.executable, "-m", "buffer", str(config)], stderr=subprocess.DEVNULL)
        try:
            yield address, fingerprint(load([str(config)])), keys
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(30)


def ours(seconds: float, clients: int = 4, tcp: bool = False) -> float:
    with buffer(tcp=tcp) as (address, print_, keys):
        return uvloop.run(GroupTraffic(address, print_, keys, clients, seconds).run())


def latency(seconds: float, groups_s: float) -> float:
    """p99 of Put in seconds while `groups_s` go through."""
    with buffer() as (address, print_, keys):
        traffic = GroupTraffic(address, print_, keys, 4, seconds, groups_s)
        uvloop.run(traffic.run())
        return float(np.percentile(traffic.puts, 99))


def put_with_open(num_open: int, seconds: float) -> float:
    """Mean seconds of a Put, one after another, with `num_open` groups open."""
    with buffer(0, groups=num_open + 64) as (address, print_, keys):
        return uvloop.run(_put_with_open(address, print_, keys, num_open, seconds))


async def _put_with_open(address: str, print_: str, folder: Path, num_open: int, seconds: float) -> float:
    keys = load_client_keys(folder, "rollout")
    async with Connection(address, "rollout-0", "rollout", print_, keys=keys) as client:
        samples, items = RolloutClient(client, lambda: 0), list[WorkItem]()
        while len(items) < num_open + 64:
            items += await samples.ask(min(1000, num_open + 64 - len(items))) or []
        began, number = time.perf_counter(), 0
        while number < 64 and time.perf_counter() - began < seconds:
            put = Put(item=items[number].item, lease=items[number].lease, samples=packed())
            await client.expect(put, Stored)
            number += 1
        return (time.perf_counter() - began) / number


# the report


def rows(seconds: float, only: set[str]) -> Iterator[dict[str, Any]]:
    """One row per measurement, ours first; later rows refer to it. Contenders take turns, ROUNDS each: medians."""
    peers: dict[str, tuple[str, Callable[[float], float | str]]] = {
        "zmq": ("bare pyzmq PUSH/PULL (the limit, nothing durable)", bare_zmq),
        "redis": ("Redis Streams, appendfsync always, XACK, XDEL", redis_streams),
        "redis-read": ("Redis Streams, appendfsync always, XREAD only", redis_read),
        "ray": ("ray.util.queue.Queue (not durable)", ray_queue),
    }
    peers = {name: peer for name, peer in peers.items() if name.partition("-")[0] in only}
    rates: dict[str, list[float | str]] = {name: [] for name in ("ours", *peers)}
    for _ in range(ROUNDS):
        rates["ours"].append(ours(seconds))
        for name, (_, measure) in peers.items():
            rates[name].append(measure(seconds))
    mine = float(tokens_s(rates["ours"]))
    yield row("Put to Take, durable (fsync)", mine, "tokens/s", "target", 1e6, rates["ours"])
    for name, (against, _) in peers.items():
        yield row("Put to Take, durable (fsync)", mine, "tokens/s", against, tokens_s(rates[name]), rates[name])
    if "tcp" in only:
        encrypted = tokens_s([ours(seconds, tcp=True) for _ in range(ROUNDS)])
        yield row("the same over TCP, encrypted", float(encrypted), "tokens/s", "the Unix socket", mine)
    if "latency" in only:
        for what, load in (("half the measured rate", mine / 2), ("half of 1 M tokens/s", 5e5)):
            yield row(f"p99 of Put at {what}", 1000 * latency(seconds, load / SAMPLES / TOKENS), "ms", "target", 20.0)
    for num_open in (10**2, 10**3, 10**4, 10**5) if "open" in only else ():
        yield row(f"Put with {num_open} open groups", 1000 * put_with_open(num_open, seconds), "ms", "", None)
    for clients in (1, 4, 16, 64, 256) if "clients" in only else ():
        value = mine if clients == 4 else ours(seconds, clients) * SAMPLES * TOKENS
        yield row(f"Put to Take with {clients} servers", value, "tokens/s", "", None)


def tokens_s(groups_s: Sequence[float | str]) -> float | str:
    """The median in tokens per second; or the reason why a contender is absent."""
    absent = next((rate for rate in groups_s if isinstance(rate, str)), None)
    return absent or SAMPLES * TOKENS * median(rate for rate in groups_s if not isinstance(rate, str))


def row(
    what: str, value: float, unit: str, against: str, against_value: float | str | None, groups_s: Sequence[Any] = ()
) -> dict[str, Any]:
    found = {"what": what, "value": value, "unit": unit, "against": against, "against_value": against_value}
    if groups_s:
        found["groups_s"] = list(groups_s)
    shown = f"{against_value:,.4g}" if isinstance(against_value, float) else against_value or ""
    print(f"{what:<36} {value:>14,.4g} {unit:<9} {against:<50} {shown}", flush=True)
    return found


def plot(found: list[dict[str, Any]]) -> None:
    """Cost against open groups and against servers."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, word, label in ((axes[0], "open", "open groups"), (axes[1], "servers", "rollout servers")):
        points = [(int(next(w for w in r["what"].split() if w.isdigit())), r["value"], r["unit"]) for r in found
                  if word in r["what"]]  # fmt: skip
        if points:
            axis.plot([p[0] for p in points], [p[1] for p in points], "o-")
            axis.set(
                xscale="log",
                xlabel=label,
                ylabel=f"{'Put' if word == 'open' else 'Put to Take'} [{points[0][2]}]",
                ylim=0,
            )
    figure.tight_layout()
    figure.savefig(RESULTS / "buffer.png", dpi=120)


def main() -> None:
    everything = "ours,zmq,redis,ray,latency,open,clients,tcp"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--only", default=everything, help=everything)
    wanted = parser.parse_args()
    busy = os.getloadavg()[0]
    found = list(rows(wanted.seconds, set(wanted.only.split(","))))
    versions = {"python": platform.python_version(), "libzmq": zmq.zmq_version()}
    for package in ("pyzmq", "ray", "redis", "msgpack", "uvloop"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    RESULTS.mkdir(exist_ok=True)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} x {platform.machine()}; {busy:.1f} processes were running before it began",
        "versions": versions,
        "command": f"python -m benchmarks.buffer --seconds {wanted.seconds:g} --only {wanted.only}",
        "rows": found,
    }
    (RESULTS / "buffer.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(found)


if __name__ == "__main__":
    main()
