"""Failed starts of vLLM in its own process: final failures become a refusal, others do not."""

import logging
import multiprocessing

import pytest

from configs.load import ConfigError
from rollout.engine.start_failure import LOGGER, final_failures


def fail(error: Exception) -> None:
    """Fail as vLLM's engine process does."""
    try:
        raise error
    except Exception:
        logging.getLogger(f"{LOGGER}.v1.engine.core").exception("EngineCore failed to start.")


def start(error: Exception) -> None:
    """Fail as vLLM's front process does, which learns only that the engine process ended."""
    process = multiprocessing.get_context("fork").Process(target=fail, args=(error,))
    process.start()
    process.join()
    raise RuntimeError("Engine core initialization failed. See root cause above.")


@pytest.mark.parametrize("error", [NotImplementedError("head size 48\nis not supported"), ValueError("no such kernel")])
def test_a_final_failure_is_refused_with_its_reason(error: Exception) -> None:
    before = list(logging.getLogger(LOGGER).handlers)
    with pytest.raises(ConfigError) as raised, final_failures():
        start(error)
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    remedy = "take another model or other keys of rollout.engine"
    assert raised.value.problems == (f"model.path: vLLM cannot serve this model here: {said}; {remedy}",)
    assert logging.getLogger(LOGGER).handlers == before


@pytest.mark.parametrize("error", [RuntimeError("gloo"), OSError("disk"), ValueError("Free memory on device is less")])
def test_a_failure_that_a_restart_may_mend_is_not_a_refusal(error: Exception) -> None:
    with pytest.raises(RuntimeError, match="Engine core initialization failed"), final_failures():
        start(error)
