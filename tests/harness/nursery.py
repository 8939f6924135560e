"""Lives of a learner without GPUs or buffer, two of three killed while they write a checkpoint; run by `test_kills.py`.

`python -m tests.harness.nursery FOLDER KILLS SEED`: one process imports everything and forks the lives, so that a life
begins in milliseconds. Each trains on from the newest checkpoint, one checkpoint a version, and notes each version's
loss in `FOLDER/losses.jsonl`; the last one is let live to the end. `FOLDER/kills.json` tells what each kill hit.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import ModelConfig
from learner.checkpoint import Checkpoints, complete, newest
from tests.harness import world

LONGEST_S = 0.5
"""Longest time between the first sign of a checkpoint and the kill: about what several take."""
EVERY = 3
"""One kill in so many comes whenever it comes; the others must find a checkpoint in the writing."""


def live(folder: Path, mesh: DeviceMesh, stop: int) -> None:
    """Train to version `stop`."""
    model = ModelConfig(path=str(folder / "model"), dtype="float32")
    policy = world.policy_of(model, mesh)
    algorithm = world.algorithm_of(policy, 64)
    learner = world.LEARNER.model_copy(update={"checkpoint_every": 1, "export_every": 2})
    checkpoints = Checkpoints(folder / "checkpoints", model, learner, algorithm.optimizer, versions=10**6)
    start = checkpoints.restore(policy)
    for version in range(start, stop):
        figures = algorithm.step(policy, world.cut(world.make_samples(version), version, [24], 0))
        with (folder / "losses.jsonl").open("a") as file:
            file.write(json.dumps([version, figures["loss"], figures["gradient/norm"]]) + "\n")
        checkpoints.save(policy, version + 1, figures["reward/mean"])
    checkpoints.close()


def born(folder: Path, stop: int) -> int:
    """Fork a life; its process id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            with world.alone() as mesh:
                live(folder, mesh, stop)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return process


def begun(folder: Path, process: int) -> None:
    """Wait until the life is writing a checkpoint."""
    deadline = time.monotonic() + 60
    while not writing(folder):
        assert os.waitpid(process, os.WNOHANG) == (0, 0), "a life ended by itself: it could not resume"
        assert time.monotonic() < deadline, "no checkpoint is begun"
        time.sleep(0.002)


def writing(folder: Path) -> list[str]:
    """The checkpoints begun and not finished."""
    return sorted(path.name for path in (folder / "checkpoints").glob("v*.tmp"))


def stopped(folder: Path, process: int, after_s: float, aimed: bool) -> None:
    """Stop the life `after_s` after the first sign of a checkpoint; if `aimed`, in the midst of one.

    Where the checkpoint is finished by then, however fast the machine is, the next is stopped after half the time.
    """
    while True:
        begun(folder, process)
        time.sleep(after_s)
        os.kill(process, signal.SIGSTOP)
        os.waitpid(process, os.WUNTRACED)
        if writing(folder) or not aimed:
            return
        os.kill(process, signal.SIGCONT)
        after_s /= 2


def main(folder: Path, kills: int, seed: int) -> None:
    draw, told, reached = random.Random(seed), [], 0
    for number in range(kills):
        for left in (folder / "checkpoints").glob("v*.tmp"):
            left.rename(left.with_suffix(".left"))  # so that the next life's is seen; a glob for .tmp misses it
            left.with_suffix(".left").rename(left.with_suffix(".old"))  # what lives clear away
        process = born(folder, 10**6)
        aimed = number % EVERY > 0
        stopped(folder, process, draw.uniform(0, LONGEST_S), aimed)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        before, reached = reached, newest(folder / "checkpoints")
        assert reached >= before, f"went back from {before} to {reached}"
        hit = writing(folder)
        assert hit or not aimed
        told.append({"reached": reached, "writing": hit, "complete": complete(folder / "checkpoints")})
    stop = reached + 2
    assert os.waitstatus_to_exitcode(os.waitpid(born(folder, stop), 0)[1]) == 0
    (folder / "kills.json").write_text(json.dumps({"stop": stop, "kills": told}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
