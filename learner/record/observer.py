"""Records the state of servers and buffer, in a thread of learner rank 0 over a connection of its own. The learner
never waits for it."""

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from buffer.keys import ClientKeys
from buffer.wire.connection import Connection, RefusedError
from buffer.wire.protocol import State, Status
from configs.entrypoint import unless
from configs.schema import Config

log = logging.getLogger(__name__)
MISSED_HEARTBEATS = 5
MOST_SERVERS = 64
EXTREMES = ("kv_usage", "stall_s", "scoring_s", "task_s", "teacher_s")
"""Figures of which the largest counts."""
NOT_SUMMED = "limit_"


class Observer:
    """Context manager around the learner's loop. `learner_gpus`: of all ranks."""

    def __init__(
        self,
        config: Config,
        keys: ClientKeys,
        learner_gpus: int,
        log_record: Callable[[Mapping[str, float | str]], None],
    ) -> None:
        self.config, self.keys, self.learner_gpus, self.log_record = config, keys, learner_gpus, log_record
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="observer", daemon=True)

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(unless(self._over, self._record()))
        except RefusedError as error:  # a buffer of another release: the run goes on without
            log.warning("no more records of servers and buffer: %s", error)

    async def _record(self) -> None:
        address, config, has_failed = self.config.buffer.address, self.config, False
        async with Connection(address, "observer", "observer", keys=self.keys, late_s=math.inf) as connection:
            while True:
                state = await connection.expect(Status(), State)
                try:
                    self.log_record(servers_record(state, time.time(), config, self.learner_gpus))
                except OSError as error:  # a full disk
                    if not has_failed:
                        log.warning("records of servers and buffer are lost as long as this lasts: %s", error)
                    has_failed = True
                await asyncio.sleep(config.log.servers_every_s)


def servers_record(state: State, now: float, config: Config, learner_gpus: int = 0) -> dict[str, float | str]:
    """One record of what the buffer said at `now` (Unix time).

    Example: `{"kind": "servers", "time": 1.7e9, "buffer/version": 7, "servers/running": 384.0,
    "server/rollout-0/tokens_per_s": 5120.0, "gpus": 3}`
    """
    silence_s = MISSED_HEARTBEATS * config.rollout.heartbeat_s
    heard = {name: one for name, one in state.servers.items() if float(one.get("silent_s") or 0.0) <= silence_s}
    record: dict[str, float | str] = {"kind": "servers", "time": round(now, 3)}
    record |= {"buffer/version": state.version, "buffer/trained": state.trained, "buffer/bytes": state.bytes_stored}
    record |= {f"buffer/items_{name}": count for name, count in state.counts.items()}
    record |= {"buffer/refused": state.errors, "buffer/retried": state.retried}
    for name, reasons in (("failed", state.failed), ("dropped", state.dropped)):
        by_kind: Counter[str] = Counter()
        for reason, count in reasons.items():
            by_kind[reason.partition(":")[0] if name == "failed" else "all"] += count
        record |= {f"buffer/{name}_{kind}": count for kind, count in by_kind.items()}
    for waiter in state.waiters:
        key = f"waiting/{waiter.kind}"
        record[key] = float(record.get(key, 0)) + 1
        record[f"{key}_s"] = max(float(record.get(f"{key}_s", 0.0)), round(waiter.seconds, 3))
    record |= {f"servers/{name}": value for name, value in _sums(heard).items()}
    record |= {"servers/known": len(state.servers), "servers/heard": len(heard)}
    if (wanted := getattr(state, "wanted_servers", None)) is not None:
        record["servers/wanted"] = wanted
    for name, one in list(state.servers.items())[:MOST_SERVERS]:
        figures = {key: one[key] for key in ("version", "leases", "silent_s") if one.get(key) is not None}
        record |= {f"server/{name}/{key}": value for key, value in (figures | one.get("stats", {})).items()}
    on_gpus = learner_gpus > 0 and config.rollout.device != "cpu"
    judges = config.reward.servers * config.reward.gpus + config.teacher.all_gpus
    servers_gpus = len(heard) * config.rollout.tensor_parallel + judges
    return record | {"gpus": learner_gpus + servers_gpus * on_gpus}


def _sums(servers: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for server in servers.values():
        for key, value in server.get("stats", {}).items():
            if key in EXTREMES:
                found[key] = max(found.get(key, value), value)
            elif not key.startswith(NOT_SUMMED):
                found[key] = found.get(key, 0.0) + value
        found["leases"] = found.get("leases", 0) + server.get("leases", 0)
    versions = [server["version"] for server in servers.values() if server.get("version") is not None]
    return found | ({"oldest_version": min(versions)} if versions else {})
