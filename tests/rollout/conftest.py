"""Coroutine tests run in an event loop of their own. What vLLM's engines leave behind is gone with their module."""

import asyncio
import gc
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Run `async def test_...`; other tests are pytest's own business."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(scope="module", autouse=True)
def no_engine_left() -> Iterator[None]:
    """vLLM leaves ZeroMQ contexts to the garbage collector, which may come to them in the middle of any later test and
    warn; and `Engine.launch` takes what was there before from its sight."""
    yield
    if gc.get_freeze_count():  # `Engine.launch` froze what it found; collecting takes half a second beside vLLM
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.unfreeze()
            gc.collect()
