"""What may happen on the weights wire, played by real processes on the devices of a `Field`.

Run over gloo by `test_weights_lives.py`, over NCCL by `tests/gpu/test_weights_nccl.py`. A server holds a version when
it has said that each of its weights is right.
"""

import os
import random
import time
from pathlib import Path
from typing import Any

from tests.harness.lives import BORN_S, Field, Life

GRACE_S = 5.0
"""Beyond the deadline, the longest that the learner may take to go on without a server that died."""


def hold(lives: list[Life], version: int, within_s: float = BORN_S) -> None:
    """Wait until all of them have said so."""
    deadline = time.monotonic() + within_s
    for life in lives:
        life.says(f"version {version} right", max(deadline - time.monotonic(), 0.01))


def killed(field: Field, mode: str) -> None:
    """A server dies between Ready and the last bucket: the others hold the version within the deadline, the next one
    too, and so does who comes in its place."""
    with field.sender():
        victim, *others = field.everywhere(mode)
        field.publish(0)
        victim.says(mode, BORN_S)
        field.kill(victim)
        hold(others, 0, field.timeout_s + GRACE_S)
        field.publish(1)
        hold(others, 1, field.timeout_s)
        hold([field.born(0)], 1)


def killed_before_it_receives(field: Field, folder: Path) -> None:
    killed(field, "go")


def killed_in_mid_broadcast(field: Field, folder: Path) -> None:
    killed(field, "half")


def a_newcomer_in_mid_run(field: Field, folder: Path) -> None:
    """It gets the current version at once, and nobody else gets it again."""
    with field.sender():
        first = [field.born(place) for place in range(max(1, len(field.servers) - 1))]
        for version in (0, 1):
            field.publish(version)
            hold(first, version)
        if len(field.servers) == 1:
            field.kill(first.pop())
        hold([newcomer := field.born(len(field.servers) - 1)], 1)
        field.publish(2)
        hold([*first, newcomer], 2)


def kills_and_joins(field: Field, folder: Path) -> None:
    """Six in a plain run; HEADRACE_CHURN=50 is the long form."""
    draw = random.Random(1)
    with field.sender():
        steady = [field.born(place) for place in range(1, len(field.servers))]
        for number in range(int(os.environ.get("HEADRACE_CHURN", "6"))):
            mode = draw.choice(["go", "half", "none"])
            victim = field.born(0, mode)
            if number and mode == "none":
                hold([victim], 2 * number - 1)  # what there is already
            field.publish(2 * number)
            if mode == "none":
                hold([victim], 2 * number)
            else:
                victim.says(mode, BORN_S)
            field.kill(victim)
            hold(steady, 2 * number, field.timeout_s + GRACE_S)
            field.publish(2 * number + 1)
            hold(steady, 2 * number + 1, field.timeout_s)


def bucket_by_bucket(field: Field, folder: Path) -> None:
    """Right into place, beside servers that have room for a copy."""
    with field.sender() as sender:
        lives = [field.born(0, staging="bucket"), *(field.born(place) for place in range(1, len(field.servers)))]
        for version in (0, 1, 2):
            field.publish(version)
            hold(lives, version)
        assert sender.stats()["weights/failed"] == 0


def through_files(field: Field, folder: Path) -> None:
    """No group is formed; two servers could share a device."""
    with field.sender(transport="safetensors", folder=folder) as sender:
        lives = field.everywhere()
        for version in (0, 1):
            field.publish(version)
            hold(lives, version)
        hold([field.born(0, staging="bucket")], 1)
        assert sender.stats()["weights/failed"] == 0


def a_broadcast_that_stalls(field: Field, folder: Path) -> None:
    """All live and beat, but one takes no more buckets: at the deadline the group is aborted on every side, and the
    next brings the version to all, the one that stalled too."""
    with field.sender() as sender:
        stalled, *others = field.everywhere("stall")
        started = time.monotonic()
        field.publish(0)
        stalled.says("stall", BORN_S)
        hold([stalled, *others], 0, field.timeout_s + GRACE_S)
        assert time.monotonic() - started > field.timeout_s * 0.9
        assert sender.stats()["weights/failed"] >= 1
        field.publish(1)
        hold([stalled, *others], 1, field.timeout_s)


SCENES: dict[str, Any] = {
    scene.__name__: scene
    for scene in (
        killed_before_it_receives,
        killed_in_mid_broadcast,
        a_newcomer_in_mid_run,
        kills_and_joins,
        bucket_by_bucket,
        through_files,
        a_broadcast_that_stalls,
    )
}
