"""Mixtures of experts of each family in a real vLLM on a CPU: every load of a policy puts every weight in its place, or
a server's own trial refuses the family."""

import logging
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from configs.expert_models import CPU, KEEPS_EXPERTS, failing, proven
from configs.load import ConfigError
from tests.harness.engines import played
from tests.harness.expert_families import FAMILIES, FamilyPolicy
from tests.harness.pushed_families import AGAIN, Play, Seen
from tests.rollout.engine.test_expert_load import make_config

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]
IN_BFLOAT16 = ("qwen3_next", "qwen3_5_moe")
"""vLLM on a CPU computes delta rules in bfloat16 only."""
EXACT = 1e-4
PROVEN = {each.kind for each in proven(CPU)}
ON_CPU = [name for name, family in FAMILIES.items() if "graphs" not in name and family.text_kind in PROVEN]
SPLIT = [name for name in ON_CPU if FAMILIES[name].text_kind in {each.kind for each in proven(CPU, parallel=2)}]


def play(name: str, folder, workers: int = 1) -> Seen:
    where = SimpleNamespace(device="cpu", dtype="bfloat16" if name in IN_BFLOAT16 else "float32", engine={})
    return played(Play(FAMILIES[name], folder, where, workers).run())


@pytest.mark.parametrize(("name", "workers"), [*((name, 1) for name in ON_CPU), *((name, 2) for name in SPLIT)])
def test_each_policy_of_a_proven_family_is_what_transformers_computes(name, workers, tmp_path):
    seen = play(name, tmp_path, workers)
    for how, off in seen.off.items():
        assert off < max(EXACT, 3 * seen.rounded[how]), (how, seen.line(name))
    assert min(seen.old.values()) > 1 and not seen.silent and seen.kinds > 5, seen.line(name)
    assert seen.same == {"disk": 0.0, "full 2": 0.0, "bucket 2": 0.0, AGAIN: 0.0}, seen.line(name)
    assert seen.trial.endswith("kinds hold"), seen.trial


def test_a_family_whose_experts_stay_is_found_by_a_servers_trial(tmp_path):
    """As gpt-oss's on a CPU, which vLLM writes past the loaders that its reload wraps."""
    assert [each.kind for each in failing(CPU) if each.fault == KEEPS_EXPERTS] == ["gpt_oss"]
    seen = play("gpt_oss", tmp_path)
    assert "model.layers.#.mlp.experts.gate_up_proj" in seen.silent
    assert "a push that changes model.layers.#.mlp.experts.down_proj changes no log-probability" in seen.trial


def start(name, folder, **arguments):
    """Start a server's engine, with dummy weights, and end it. `arguments` of vLLM take the place of ours."""
    from rollout.engine import vllm_engine

    FamilyPolicy(FAMILIES[name].model(seed=0), torch.float32).save(folder)
    made = vllm_engine.engine_arguments

    async def started():
        engine = await vllm_engine.Engine.start(make_config(folder), seed=1)
        await engine.close()

    with patch.object(vllm_engine, "engine_arguments", lambda *given: made(*given) | arguments):
        played(started())


def test_a_server_starts_with_a_mixture_that_nobody_has_compared(tmp_path, caplog):
    assert "granitemoe" not in PROVEN
    with caplog.at_level(logging.INFO, "rollout"):
        start("granitemoe", tmp_path)
    assert "experts: vLLM loads all 12 kinds of weights again; tried in " in caplog.text


def test_a_server_refuses_a_mixture_that_fails_its_trial(tmp_path):
    with pytest.raises(ConfigError) as caught:
        start("gpt_oss", tmp_path, worker_extension_cls="tests.harness.tried_worker.UnlistedWorker")
    [problem] = caught.value.problems
    what = "a push that changes model.layers.#.mlp.experts.down_proj changes no log-probability"
    assert problem.startswith(f"model.path: this vLLM does not load policies into its experts: {what}; use another")
