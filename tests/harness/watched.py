"""Folders of runs to watch: records, looks at the servers, evaluations, and a ledger with answers."""

import json
import math
import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from buffer.store.segments import Segments, folder_of
from buffer.store.sql import APPLICATION, SCHEMA, TABLES
from buffer.wire.message import Array
from buffer.wire.protocol import State, Waiter
from buffer.wire.sample import Sample
from configs.load import load, write
from configs.schema import Config
from tests.harness.keys import give_keys

HOSTILE = "</script><script>window.broken = true</script><img src=x onerror='window.broken = true'>"
"""An answer that wants to be a program."""

LAUNCHED = 9e8
"""Unix time."""


def make_config(folder: Path, *more: str) -> Config:
    """A run `toy` of 40 versions in `folder`, written there too, and launched before any of its records."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    words = [f"run.folder={folder}", "run.name=toy", "run.versions=40", f"model.path={folder}/model"]
    words += [f"data.train={folder}/p.jsonl", "reward.function=countdown", "rollout.servers=2", *more]
    config = load([f"--{word}" for word in words])
    write(config, folder / "toy" / "config.yaml")
    os.utime(folder / "toy" / "config.yaml", (LAUNCHED, LAUNCHED))
    give_keys(folder / "toy")
    return config


def record(version: int, **more: float) -> dict[str, Any]:
    """The record of a version: the learner waits 62 % of the time, the reward rises."""
    return {
        "version": version, "reward/mean": 0.2 + 0.5 * version / 40, "length/mean": 30.5 + version, "length/max": 64.0,
        "length/truncated": 0.01, "entropy/mean": 2.0 * math.exp(-version / 20), "groups/solved_all": 0.1,
        "groups/solved_none": 0.3, "mismatch/k3_fresh": 1e-13 * version, "offpolicy/k3": 1e-4, "ess/token": 0.99,
        "ess/sequence": 0.9, "age/share_0": 0.25, "age/share_1": 0.5, "age/share_2-3": 0.25, "age/mean": 1.5,
        "age/max": 3, "gradient/norm": 0.1 + 0.001 * version, "lr": 1e-5, "ratio/max": 1.5, "tokens": 5000.0,
        "tokens_per_s": 500.0, "time/version_s": 10.0, "time/wait_s": 6.2, "time/train_s": 3.0, "time/publish_s": 0.5,
        "time/checkpoint_s": 0.1, "weights/pause_s": 0.02, "weights/lag_s": 0.3, "memory/host_gib": 1.25,
    } | more  # fmt: skip


def look(time: float, version: int, **more: float) -> dict[str, Any]:
    """A look at two servers whose places are all taken."""
    found: dict[str, Any] = {
        "kind": "servers", "time": time, "buffer/version": version, "buffer/items_leased": 20, "gpus": 3,
        "servers/known": 2, "servers/heard": 2, "servers/running": 380.0, "servers/places": 400.0,
        "servers/preempted": 0.0, "servers/oldest_version": version,
    }  # fmt: skip
    for name in ("rollout-0", "rollout-1"):
        stats = {"tokens_per_s": 640.0, "running": 190.0, "waiting": 4.0, "kv_usage": 0.8, "places": 200.0}
        stats |= {"places_taken": 200.0, "version": version}
        found |= {f"server/{name}/{key}": value for key, value in stats.items()}
    return found | more


def evaluation(version: int, mean: float) -> dict[str, Any]:
    """The record of an evaluation of a version, on one set."""
    return {"version": version + 1, "eval/due": version, "eval/version": version, "eval/aime/mean@8": mean}


def append(run: Path, *records: dict[str, Any]) -> None:
    """Write `records` at the end of the run's file."""
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


def state(**more: Any) -> State:
    """What a buffer of that run answers: one server generates, the other is lost, the learner waits."""
    stats = {"tokens_per_s": 640.0, "running": 190.0, "waiting": 4.0, "kv_usage": 0.8, "places": 200.0}
    servers = {
        "rollout-0": {"version": 6, "leases": 12, "silent_s": 0.1, "stats": stats | {"places_taken": 200.0}},
        "rollout-1": {"version": 6, "leases": 0, "silent_s": 240.0, "stats": {}},
    }
    waiter = Waiter(who="learner-0", kind="Take", why="batch 7 has 20 of 32 groups", seconds=3.25)
    fields: dict[str, Any] = {
        "version": 7, "trained": 6, "counts": {"leased": 12, "stored": 20}, "dropped": {}, "ages": {0: 100},
        "failed": {"reward: KeyError \"answer\"": 4}, "lengths": {"generated": [252, 1008, 20160, 10080, 252]},
        "bytes_stored": 1000, "servers": servers, "waiters": [waiter], "errors": 0,
    }  # fmt: skip
    return State(**(fields | more))


def sample(answer: str) -> bytes:
    """A sample of a single turn, packed."""
    one = np.array([1, 2])
    return Sample(
        tokens=Array.of(one.astype(np.int32)),
        sampled=Array.of(np.array([0, 1], np.uint8)),
        behaviour_logprobs=Array.of(np.array([0, -0.5], np.float32)),
        versions=Array.of(np.array([-1, 3], np.int32)),
        reward=1.0,
        finish="stop",
        answer=answer,
    ).pack()


def store(run: Path, packed: bytes | None = None) -> None:
    """Five items; `packed`: the sample of each, if not one of a single turn."""
    db = sqlite3.connect(run / "buffer.sqlite")
    db.executescript(f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA};" + TABLES)
    prompts = [{"prompt": [{"role": "user", "content": "8 6 4=2"}]}, {"problem": "What <b> is 1+1?"}]
    for row, prompt in enumerate(prompts):
        db.execute("INSERT INTO problems VALUES (?, ?, NULL)", (row, json.dumps(prompt)))
    samples = Segments(folder_of(run / "buffer.sqlite"), 1, 0)
    for item, (row, batch) in enumerate([(0, 0), (1, 0), (0, 39), (1, 39), (0, -1)]):
        data = packed or sample(f"answer {item} <i>")
        with samples.appended({item: [data]}) as places:
            place = places[item]
        values = f"{item}, {row}, 0, 'trained', '', 0, 's', 1, 1, 1, {batch}, 1, 2, 1, 0, 0, 0, 0, 9"
        db.execute(f"INSERT INTO items VALUES ({values})")
        where = (place.segment, place.position, len(data))
        db.execute("INSERT INTO samples VALUES (?, 0, 2, 1, ?, 0, ?, ?, ?, NULL)", (item, batch / 39, *where))
    samples.close()
    db.execute(
        "INSERT INTO totals VALUES ('failed', 'reward: KeyError', 7, 0, 0, 0, 0), ('dropped', 'x', 2, 0, 0, 0, 0)"
    )
    db.commit()
    db.close()
