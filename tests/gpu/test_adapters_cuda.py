"""Adapters on an NVIDIA GPU, in bfloat16: swapped in flight under CUDA graphs, and trained."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.schema import ModelConfig
from learner.train.batch import Batch
from tests.gpu.test_learner import gpu
from tests.harness import world
from tests.harness.adapted import ATTENTION, LINEAR, make_base, make_experts
from tests.harness.adapters import adapted_model, stir
from tests.harness.one_gpu import nothing_left
from tests.harness.world import LEARNER, algorithm_of, cut, make_samples, policy_of
from tests.rollout.engine.lora.test_adapter_engine import ON_GPU, PROMPTS, TEMPERATURE, UPDATES, play_updates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
__all__ = ["gpu"]
NEAR, APART = 0.1, 0.5
"""Mean difference of right log-probabilities, and of those of the version before where versions change, in nats: 0.034
and 1.9 on a CPU in bfloat16."""
GRADIENT = 0.15
"""Relative difference of a matrix's gradient in bfloat16 from that in float32: 0.07 at most on a CPU."""


@pytest.fixture(scope="module", params=[(make_base, LINEAR), (make_experts, ATTENTION)], ids=["dense", "experts"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    with nothing_left():
        return asyncio.run(play_updates(tmp_path_factory.mktemp("model"), ON_GPU, *request.param))


@pytest.mark.vllm
def test_adapters_change_under_sequences_whose_tokens_carry_their_versions(seen: SimpleNamespace) -> None:
    assert not any(seen.pauses)
    stamps = [list(completion.versions) for _, completion in seen.in_flight]
    assert all(versions == sorted(versions) for versions in stamps)
    assert {version for versions in stamps for version in versions} == set(range(UPDATES + 1))
    assert sum(versions[0] != versions[-1] for versions in stamps) >= len(PROMPTS)
    right, shifted = seen.adapted.differences(seen.in_flight, TEMPERATURE)
    assert right.mean() < NEAR and shifted.mean() > APART, (right.mean(), right.max(), shifted.mean())


@pytest.mark.vllm
def test_every_probe_agreed(seen: SimpleNamespace) -> None:
    assert len(seen.probes) == UPDATES and all(0 < probe < ON_GPU.close for probe in seen.probes), seen.probes


def gradients(model: ModelConfig, mesh: DeviceMesh, **changes) -> dict[str, torch.Tensor]:
    policy, entries = policy_of(model, mesh, LEARNER.model_copy(update=changes)), make_samples(long=90)
    stir(policy)
    algorithm_of(policy, 200).backward(policy, Batch.from_part(cut(entries, 3, [len(entries)], 0), 200))
    return {name: gradient.float().cpu() for name, gradient in world.gradients(policy).items()}


def compared(model: ModelConfig, mesh: DeviceMesh, **changes) -> list[float]:
    """Relative differences, matrix by matrix, in bfloat16 on `mesh` from float32 on a CPU."""
    exact = gradients(model.model_copy(update={"dtype": "float32"}), init_device_mesh("cpu", (1,)))
    found = gradients(model, mesh, **changes)
    assert exact.keys() == found.keys() and all(x.isfinite().all() for x in found.values())
    return [float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact]


@pytest.mark.parametrize("changes", [{}, {"compile": True, "activation_checkpointing": "none"}], ids=str)
def test_the_gradient_of_an_adapter(tmp_path: Path, gpu, changes: dict) -> None:
    """On a GPU in bfloat16, near that on a CPU in float32."""
    torch._dynamo.reset()
    assert max(compared(adapted_model(tmp_path, dtype=torch.bfloat16), gpu, **changes)) < GRADIENT
