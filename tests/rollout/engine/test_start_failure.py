"""Failed starts of vLLM in its own process: final failures become a refusal, others do not."""

import logging
import multiprocessing
import os

import pytest

from configs.load import ConfigError
from rollout.engine.start_failure import FILE, LOGGER, final_failures, report_final_failures


def fail(error: Exception) -> None:
    """Fail as vLLM's engine process does."""
    try:
        raise error
    except Exception:
        logging.getLogger(f"{LOGGER}.v1.engine.core").exception("EngineCore failed to start.")


def fail_spawned(error: Exception) -> None:
    """Fail as a spawned engine process does, which imports the worker's extension first."""
    report_final_failures()
    fail(error)


def start(error: Exception, method: str = "fork") -> None:
    """Fail as vLLM's front process does, which learns only that the engine process ended."""
    target = fail if method == "fork" else fail_spawned
    process = multiprocessing.get_context(method).Process(target=target, args=(error,))  # type: ignore[attr-defined]
    process.start()
    process.join()
    raise RuntimeError("Engine core initialization failed. See root cause above.")


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("head size 48\nis not supported"),
        ValueError("no such kernel"),
        AttributeError("'Lfm2Config' object has no attribute 'block_dim'"),
    ],
)
def test_a_final_failure_is_refused_with_its_reason(error: Exception) -> None:
    before = list(logging.getLogger(LOGGER).handlers)
    with pytest.raises(ConfigError) as raised, final_failures():
        start(error)
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    remedy = "take another model or other keys of rollout.engine"
    assert raised.value.problems == (f"model.path: vLLM cannot serve this model here: {said}; {remedy}",)
    assert logging.getLogger(LOGGER).handlers == before


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_reason_of_a_spawned_process_arrives_too(method: str) -> None:
    """vLLM 0.32 spawns its engine on a CPU as well, whose reason was lost."""
    with pytest.raises(ConfigError, match=r"NotImplementedError: gated experts only"), final_failures():
        start(NotImplementedError("gated experts only"), method)
    assert FILE not in os.environ


def test_no_reason_is_written_where_nobody_starts_an_engine() -> None:
    before = list(logging.getLogger(LOGGER).handlers)
    report_final_failures()
    assert logging.getLogger(LOGGER).handlers == before


@pytest.mark.parametrize("error", [RuntimeError("gloo"), OSError("disk"), ValueError("Free memory on device is less")])
def test_a_failure_that_a_restart_may_mend_is_not_a_refusal(error: Exception) -> None:
    with pytest.raises(RuntimeError, match="Engine core initialization failed"), final_failures():
        start(error)
