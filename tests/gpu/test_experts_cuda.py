"""A mixture of experts on an NVIDIA GPU, in bfloat16: loaded into vLLM's Triton kernels, its routes, and trained."""

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
from tests.harness.expert_batches import expert_model, routed
from tests.harness.one_gpu import nothing_left
from tests.harness.world import LEARNER, algorithm_of, cut, make_groups, policy_of
from tests.rollout.engine import test_expert_load, test_routing_replay
from tests.rollout.engine.test_expert_load import ON_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
__all__ = ["gpu"]
ALIKE, OTHER = 0.88, 0.6
"""Shares of tokens and layers with the experts that float32 chooses: at least of the same weights in bfloat16, at most
of other weights; 0.96 and 0.29 on a CPU."""
FAR = 0.3
"""Difference of a token's log-probability, in nats, above which the weights were others."""
GRADIENT = 0.1
"""Relative difference of a weight's gradient in bfloat16, with the same experts, from that in float32: 0.03 at most on
a CPU."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    with nothing_left():
        return asyncio.run(test_expert_load.play(tmp_path_factory.mktemp("experts"), ON_GPU))


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    with nothing_left():
        folder, long = tmp_path_factory.mktemp("routes"), 350  # so that it lasts until it is swapped under
        return asyncio.run(test_routing_replay.play(folder, ON_GPU.device, ON_GPU.dtype, FAR, long, **ON_GPU.engine))


@pytest.mark.vllm
def test_each_policy_is_what_transformers_computes(loaded: SimpleNamespace) -> None:
    """Three staged ones, three in buckets, a folder; `old` is how far the weights before are off, `rounded` how far
    transformers is in bfloat16, which flips experts too: 0.02 to 0.14 nat."""
    assert len(loaded.off) == 7
    for how, off in loaded.off.items():
        assert off < 3 * loaded.rounded[how] < loaded.old[how] / 2, (how, loaded.off, loaded.rounded, loaded.old)
    assert "1 weights of vLLM's model were not received, model.layers.0.mlp.experts" in loaded.incomplete


@pytest.mark.vllm
def test_the_probe_agreed_with_every_policy(loaded: SimpleNamespace) -> None:
    for stats in loaded.probes.values():
        assert stats["weights/version"] == 2 and stats["weights/failed"] == 0 and stats["weights/probe"] > 0


@pytest.mark.vllm
def test_routes_are_those_of_transformers(returned: SimpleNamespace) -> None:
    """In turns, which ask for rows that are not known yet, and of sequences that were preempted."""
    for turn in returned.turns:
        assert turn.shape == (40 + 2 * 33, 2, 2) and turn.asked == [0, 40 + 30 - 1]
        assert turn.alike > ALIKE and not turn.rest.any()
    assert returned.preempted > 0 and min(returned.many) > ALIKE, returned.many


@pytest.mark.vllm
def test_each_token_in_flight_has_the_routes_of_the_policy_that_read_it(returned: SimpleNamespace) -> None:
    swapped = returned.swapped
    assert swapped.switch > 0 and swapped.before > ALIKE and swapped.behind < OTHER, swapped


def gradients(model: ModelConfig, mesh: DeviceMesh, **changes) -> dict[str, torch.Tensor]:
    """With experts that are given, because bfloat16 chooses others here and there."""
    policy = policy_of(model, mesh, LEARNER.model_copy(update=changes), replay=True)
    entries = routed(make_groups())
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), 200, replayed=policy.replayed)
    algorithm_of(policy, 200).backward(policy, batch)
    return {name: gradient.float().cpu() for name, gradient in world.gradients(policy).items()}


def compared(model: ModelConfig, mesh: DeviceMesh, **changes) -> dict[str, float]:
    """Relative differences, weight by weight, in bfloat16 on `mesh` from float32 on a CPU."""
    exact = gradients(model.model_copy(update={"dtype": "float32"}), init_device_mesh("cpu", (1,)))
    found = gradients(model, mesh, **changes)
    assert exact.keys() == found.keys() and all(x.isfinite().all() for x in found.values())
    return {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}


@pytest.mark.parametrize("changes", [{}, {"compile": True, "activation_checkpointing": "none"}], ids=str)
def test_the_gradient_of_a_mixture(tmp_path: Path, gpu, changes: dict) -> None:
    """On a GPU in bfloat16, near that on a CPU in float32, all experts' and the routers' too."""
    torch._dynamo.reset()
    found = compared(expert_model(tmp_path, dtype="bfloat16"), gpu, **changes)
    assert max(found.values()) < GRADIENT, found
