"""Learners without GPUs or buffer, two of three killed while they write a checkpoint; run by `test_kills.py`.

`run` is a process that has imported everything and forks the learners, so that each starts in milliseconds;
`python -m tests.harness.nursery FOLDER KILLS SEED` runs it by hand. Each learner restores the newest checkpoint,
writes one checkpoint per version, and appends each version's loss to `FOLDER/losses.jsonl`; the last one runs to the
end. `FOLDER/kills.json` lists what each kill interrupted.
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

from configs.checkpoint_files import complete, newest
from configs.inner_command import inner_words
from configs.schema import ModelConfig
from learner.checkpoint import Checkpoints
from tests.harness import world

LONGEST_S = 0.5
"""Longest time between the start of a checkpoint and the kill: about as long as several checkpoints take."""
EVERY = 3
"""Every third kill comes at a random moment; the others must interrupt the writing of a checkpoint."""


def run_learner(folder: Path, mesh: DeviceMesh, stop: int) -> None:
    """Train from the newest checkpoint to version `stop`."""
    model = ModelConfig(path=str(folder / "model"), dtype="float32")
    policy = world.policy_of(model, mesh)
    algorithm = world.algorithm_of(policy, 200)
    learner = world.LEARNER.model_copy(update={"checkpoint_every": 1, "export_every": 2})
    checkpoints = Checkpoints(folder / "checkpoints", model, learner, algorithm.optimizer, versions=10**6)
    start = checkpoints.restore(policy)
    for version in range(start, stop):
        figures = algorithm.step(policy, world.cut(world.make_samples(version), version, [24], 0))
        with (folder / "losses.jsonl").open("a") as file:
            file.write(json.dumps([version, figures["loss"], figures["gradient/norm"]]) + "\n")
        checkpoints.save(policy, version + 1, figures["reward/mean"])
    checkpoints.close()


def fork(folder: Path, stop: int) -> int:
    """Fork a learner; returns its process id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            with world.alone() as mesh:
                run_learner(folder, mesh, stop)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return process


def wait_for_writing(folder: Path, process: int) -> None:
    """Wait until the learner is writing a checkpoint."""
    deadline = time.monotonic() + 60
    while not writing(folder):
        assert os.waitpid(process, os.WNOHANG) == (0, 0), "a learner ended by itself: it could not resume"
        assert time.monotonic() < deadline, "no checkpoint is begun"
        time.sleep(0.002)


def writing(folder: Path) -> list[str]:
    """The checkpoints that are not finished."""
    return sorted(path.name for path in (folder / "checkpoints").glob("v*.tmp"))


def stop_while_writing(folder: Path, process: int, after_s: float, aimed: bool) -> None:
    """Stop the learner `after_s` after a checkpoint was started; if `aimed`, while it writes one.

    If that checkpoint is finished by then, stop the next one after half the time, however fast the machine is.
    """
    while True:
        wait_for_writing(folder, process)
        time.sleep(after_s)
        os.kill(process, signal.SIGSTOP)
        os.waitpid(process, os.WUNTRACED)
        if writing(folder) or not aimed:
            return
        os.kill(process, signal.SIGCONT)
        after_s /= 2


def main(folder: Path, kills: int, seed: int, first: int = 0) -> None:
    """`first`: the number of the first kill, of which every third comes at a random moment."""
    draw, kills_made, reached = random.Random(seed), [], 0
    for number in range(first, first + kills):
        for left in (folder / "checkpoints").glob("v*.tmp"):
            left.rename(left.with_suffix(".left"))  # so that the next learner's is noticed
            left.with_suffix(".left").rename(left.with_suffix(".old"))  # which learners remove
        process = fork(folder, 10**6)
        aimed = number % EVERY > 0
        stop_while_writing(folder, process, draw.uniform(0, LONGEST_S), aimed)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        before, reached = reached, newest(folder / "checkpoints")
        assert reached >= before, f"went back from {before} to {reached}"
        hit = writing(folder)
        assert hit or not aimed
        kills_made.append({"reached": reached, "writing": hit, "complete": complete(folder / "checkpoints")})
    stop = reached + 2
    assert os.waitstatus_to_exitcode(os.waitpid(fork(folder, stop), 0)[1]) == 0
    (folder / "kills.json").write_text(json.dumps({"stop": stop, "kills": kills_made}))


def run(folder: Path, kills: int, seed: int, log: Path) -> None:
    """Run the forked process. Its learners write their output to the file `log`; the first kill is an aimed one."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    main(folder, kills, seed, first=1)


if __name__ == "__main__":
    inner_words("FOLDER", "KILLS", "SEED")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
