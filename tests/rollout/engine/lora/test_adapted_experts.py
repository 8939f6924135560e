"""An adapter of the attention of a tiny Qwen3-MoE in the real vLLM, updated under sequences: against transformers with
peft's. Newer vLLMs are given the kernel that a CPU has for experts (`tests/harness/cpu_experts.py`).
"""

import pytest

from tests.harness.adapted import ATTENTION, make_experts
from tests.harness.engines import played
from tests.rollout.engine.lora.test_adapter_engine import (
    CLOSE,
    ON_CPU,
    TEMPERATURE,
    UPDATES,
    play_updates,
)

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]
EXTENSION = {"worker_extension_cls": "tests.harness.cpu_experts.CpuExpertsWorker"}


def test_adapters_change_under_sequences_of_a_mixture_of_experts(tmp_path, monkeypatch):
    from rollout.engine import vllm_engine

    arguments = vllm_engine.engine_arguments
    monkeypatch.setattr(vllm_engine, "engine_arguments", lambda *given: arguments(*given) | EXTENSION)
    seen = played(play_updates(tmp_path, ON_CPU, make_experts, ATTENTION))
    assert len(seen.probes) == UPDATES and all(0 < probe < CLOSE for probe in seen.probes), seen.probes
    right, shifted = seen.adapted.differences(seen.in_flight, TEMPERATURE)
    assert right.mean() < CLOSE, "one choice of experts that is nearly a tie may differ, and tokens behind it a little"
    assert shifted.mean() > 0.01, "a version of one token is told"
