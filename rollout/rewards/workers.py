"""Reward workers: processes that score answers and can be killed when a reward function hangs.

A rollout server owns one pool. `score` waits for a free worker and then for the function, at most `reward.timeout_s`
per call. A function that takes longer, crashes its process or raises ends in RewardError, never in a reward. Workers
are spawned, import neither torch nor vllm, and die with the server, however it dies.
"""

import asyncio
import multiprocessing
import os
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait

from pebble import ProcessExpired, ProcessPool

from configs.schema import RewardConfig
from rollout.errors import RewardError
from rollout.rewards import load_reward
from rollout.rewards.convention import Answer, Reward, Score

_loaded: list[Reward] = []
"""In a worker: its reward function."""


class RewardPool:
    """An async context manager around the workers. Raises ValueError at once for a reward that cannot be loaded."""

    def __init__(self, config: RewardConfig) -> None:
        self.config, self.reward = config, load_reward(config)
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPool(config.workers, context=spawn, initializer=_start, initargs=(config,))

    async def __aenter__(self) -> "RewardPool":
        self._pool.schedule(os.getpid)  # any call starts the workers, so that the first group need not wait for them
        return self

    async def __aexit__(self, *error: object) -> None:
        self._pool.stop()
        await asyncio.to_thread(self._pool.join)

    async def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score per answer of a group. Raises RewardError with the reason; a cancelled call is killed."""
        calls = [answers] if self.reward.batch else [[answer] for answer in answers]
        futures = [self._pool.schedule(_score, args=(call,), timeout=self.config.timeout_s) for call in calls]
        try:
            parts = await asyncio.gather(*map(asyncio.wrap_future, futures))
        except TimeoutError:
            limit = f"reward.timeout_s ({self.config.timeout_s:g} s)"
            reason = f"{self.reward.name} took longer than {limit}; its process was killed"
            raise RewardError(reason, origin="TimeoutError") from None
        except ProcessExpired as error:
            reason = f"{self.reward.name} ended its process (exit code {error.exitcode})"
            raise RewardError(reason, origin="ProcessExpired") from None
        finally:
            for future in futures:
                future.cancel()
        scores: list[Score] = []
        for part in parts:
            if isinstance(part, RewardError):
                raise part
            scores += part
        return scores


def _start(config: RewardConfig) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _loaded.append(load_reward(config))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _score(answers: Sequence[Answer]) -> list[Score] | RewardError:
    """In a worker: the scores, or why there are none, with the traceback as a note."""
    (reward,) = _loaded
    try:
        return reward.score(answers)
    except RewardError as error:
        return error
    except Exception as error:  # a user's exception might not survive pickling
        name = type(error).__name__
        failed = RewardError(f"{reward.name} raised {name}: {error}", origin=name)
        failed.add_note(traceback.format_exc())
        return failed
