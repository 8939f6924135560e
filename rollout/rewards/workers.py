"""Reward workers: processes that score answers and can be killed when a reward function hangs.

A rollout server owns one pool. `score` waits for a free worker and then for the function, at most
`reward.timeout_s` a call; a function that takes longer, crashes its process or raises ends in RewardError, never in
a reward. Workers are spawned, import neither torch nor vllm, and die with the server, however it dies.
"""

import asyncio
import concurrent.futures
import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from pebble import ProcessExpired, ProcessPool

from configs.schema import RewardConfig
from rollout.rewards import Answer, Reward, RewardError, Score, load_reward

_loaded: list[Reward] = []
"""In a worker: the reward function it serves."""


class RewardPool:
    """An async context manager around the workers; raises ValueError at once for a reward that cannot be loaded."""

    def __init__(self, config: RewardConfig) -> None:
        self.config, self.reward = config, load_reward(config)
        self._pool = ProcessPool(
            max_workers=config.workers,
            context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(config,),
        )

    async def __aenter__(self) -> "RewardPool":
        self._pool.schedule(_ready)  # starts the workers, so that the first group need not wait for them
        return self

    async def __aexit__(self, *error: object) -> None:
        self._pool.stop()
        await asyncio.to_thread(self._pool.join)

    async def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score for each answer of a group. Raises RewardError with the reason; a cancelled call is killed."""
        calls = [answers] if self.reward.batch else [[answer] for answer in answers]
        futures = [self._pool.schedule(_score, args=(call,), timeout=self.config.timeout_s) for call in calls]
        try:
            parts = await asyncio.gather(*map(asyncio.wrap_future, futures))
        except concurrent.futures.TimeoutError:
            limit = f"reward.timeout_s ({self.config.timeout_s:g} s)"
            raise RewardError(f"{self.reward.name} took longer than {limit}; its process was killed") from None
        except ProcessExpired as error:
            raise RewardError(f"{self.reward.name} ended its process (exit code {error.exitcode})") from None
        finally:
            _cancel(futures)
        scores: list[Score] = []
        for part in parts:
            if isinstance(part, str):
                raise RewardError(part)
            scores += part
        return scores


def _cancel(futures: Sequence[Any]) -> None:
    for future in futures:
        if not future.done():
            future.cancel()


def _start(config: RewardConfig) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _loaded.append(load_reward(config))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _ready() -> None:
    """In a worker: nothing to do."""


def _score(answers: Sequence[Answer]) -> list[Score] | str:
    """In a worker: the scores, or why there are none (what users' functions raise might not survive the way back)."""
    (reward,) = _loaded
    try:
        return reward.score(answers)
    except RewardError as error:
        return str(error)
    except Exception as error:  # the outermost frame of this process that is ours
        return f"{reward.name} raised {type(error).__name__}: {error}"
