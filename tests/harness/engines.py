"""Real vLLM engines that files of tests share, one of each kind in a session: a start takes many seconds.

    def test_something(dense_engine):                 # fixtures in tests/rollout/engine/conftest.py
        found = dense_engine.play(scene)              # scene(engine) is a coroutine; what it returns is returned

The engine has its own event loop, which runs while a scene is played. Its tests are one `xdist_group`, so one worker of
pytest-xdist runs all of them.

Scenes share one engine, so each scene keeps these rules:
- it loads its own policy, by the weights wire or from a folder of the same shapes, before it generates;
- it depends on no absolute number: `engine.version` and the salt are left from the scene before, and `engine.tokens`
  and the counts of `engine.stats()` continue;
- it finds nothing in the prefix cache, because loading a policy changes the salt, and it may leave anything there;
- when it returns, no request runs, generation is not paused, no receiver follows a learner, and the workers have no
  adapter or extension left.
A test that kills the engine or one of its processes, leaves it with half a policy, or needs other arguments starts its
own engine, and is marked `long`.
"""

import asyncio
import gc
import os
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from configs.schema import Config
from rollout.engine.early_process import EarlyProcess

IDLE_S = 60
DENSE_VOCABULARY = 320
"""Token ids of the dense kind: as many as `tests/rollout/chat/chat_templates.py` has."""


class SharedEngine:
    """An engine that has started, and the event loop in which it lives."""

    def __init__(self, config: Config, kind: str) -> None:
        os.environ["VLLM_CPU_CI_ENV"] = "1"  # vLLM warms nothing up
        self.config, self.kind = config, kind
        self._loop = asyncio.Runner()
        with EarlyProcess(cpu=True) as self.early:
            from rollout.engine.vllm_engine import Engine

            self._engine = self._loop.run(Engine.start(config, seed=1, early=self.early))

    def play(self, scene: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run the scene and return its result. Fails if it leaves a sequence running."""

        async def played() -> Any:
            found = await scene(self._engine)
            await asyncio.wait_for(idle(self._engine), IDLE_S)
            return found

        return self._loop.run(played())

    def close(self) -> None:
        """End vLLM's process, and collect its garbage in this one."""
        self._loop.run(self._engine.close())
        self._loop.close()
        del self._engine
        collect()


def played(scene: Coroutine[Any, Any, Any]) -> Any:
    """Run a scene that starts and ends its own engine; returns its result."""
    os.environ["VLLM_CPU_CI_ENV"] = "1"
    try:
        return asyncio.run(scene)
    finally:
        collect()


def collect() -> None:
    """Collect the garbage of an ended engine in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # vLLM leaves a ZeroMQ context to the garbage collector
        gc.unfreeze()  # `Engine.launch` froze what it found
        gc.collect()


async def idle(engine: Any) -> None:
    """Wait until vLLM's process has reported that no sequence runs or waits."""
    await engine.alive(IDLE_S)
    while (stats := engine.stats())["running"] or stats["waiting"]:
        await asyncio.sleep(0.01)


def dense_config(folder: Path) -> Config:
    """For a model of `tests/harness/published.py` with DENSE_VOCABULARY, in float32."""
    return Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "train.parquet", "max_prompt_tokens": 100},
            "reward": {"function": "countdown"},
            "sampling": {"max_tokens": 800},
            "weights": {"bucket_mib": 1, "probe_every": 1, "probe_tolerance": 1e-3, "timeout_s": 120},
            "rollout": {"device": "cpu"},
        }
    )


def vision_config(folder: Path, kind: str, **sections: Any) -> Config:
    """For a model of `tests/harness/tiny_vlm.py`; `sections` of the run file are added. In float32, but vLLM on a CPU
    computes the delta rules of Qwen3.5 in bfloat16 only."""
    from tests.harness.tiny_vlm import PATCH  # takes seconds to import

    given: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "dtype": "bfloat16" if kind == "qwen3_5" else "float32"},
        "data": {"train": "train.parquet", "max_prompt_tokens": 300, "max_pixels": 64 * (2 * PATCH[kind]) ** 2},
        "reward": {"function": "countdown"},
        "sampling": {"max_tokens": 100},
        "rollout": {"device": "cpu", "sequences": 16},
    }
    merged = {name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}}
    return Config.model_validate(merged)
