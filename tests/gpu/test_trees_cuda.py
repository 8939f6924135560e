"""Trees of texts on a GPU, also under sliding windows: attention against an explicit mask, and whole steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import AlgorithmConfig, ModelConfig
from learner.model.kernels import joined
from learner.model.microbatch import Microbatch
from tests.gpu.test_learner import KERNELS, gpu  # noqa: F401
from tests.harness.world import LEARNER, policy_of
from tests.learner.model.test_forest import forest_of
from tests.learner.model.test_shared_prompts import by_mask, inputs_of, largest_error, with_gradients
from tests.learner.train.test_trees import saved, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def grown(seed: int, count: int = 12, longest: int = 900) -> list[list[int]]:
    """Texts of which each goes on from a random place of an earlier one."""
    draw = np.random.default_rng(seed)
    texts = [draw.integers(0, 50, longest // 2).tolist()]
    while len(texts) < count:
        before = texts[draw.integers(len(texts))]
        kept = before[: draw.integers(1, len(before))] if draw.random() < 0.85 else []
        texts.append(kept + draw.integers(0, 50, draw.integers(2, longest - len(kept))).tolist())
    return texts


def seen_by(row: Microbatch, window: int | None) -> Tensor:
    seen = torch.zeros(len(row.tokens), len(row.tokens), dtype=torch.bool)
    bounds = row.cu_seqlens.tolist()
    pieces = row.shared.keys.split(row.shared.starts.diff().tolist())
    for start, stop, keys in zip(bounds, bounds[1:], pieces, strict=False):
        for query in range(start, stop):
            own = keys[: len(keys) - (stop - 1 - query)]
            seen[query, own if window is None else own[-window:]] = True
    return seen


@pytest.mark.parametrize("window", [None, 64, 300])
@pytest.mark.parametrize(("heads", "head_dim"), [((12, 2), 128), ((4, 4), 64)])
@pytest.mark.parametrize("name", KERNELS)
def test_trees_by_an_explicit_mask(name: str, heads: tuple[int, int], head_dim: int, window: int | None) -> None:
    """In bf16, against fp32 arithmetic on the same inputs; beside it the same texts apart."""
    errors = []
    texts = grown(0)
    for row in (forest_of(texts)[0], *(forest_of([text])[0] for text in texts[:3])):
        if row.shared is None:
            continue
        given = [x.cuda() for x in inputs_of(row, heads, torch.bfloat16, head_dim)]
        seen = seen_by(row, window).cuda()
        wanted = with_gradients(lambda q, k, v, seen=seen: by_mask(q, k, v, seen), *(x.float() for x in given))
        there = row.to(torch.device("cuda"))
        options = True, head_dim**-0.5, window, name

        def attend(q: Tensor, k: Tensor, v: Tensor, there=there, options=options) -> Tensor:
            return joined.attention(q, k, v, there.cu_seqlens, there.max_seqlen, there.shared, options)

        found = with_gradients(attend, *given)
        assert all(x.isfinite().all() for x in found)
        errors.append(largest_error(found, wanted))
    assert errors[0] < 2e-2, errors


@pytest.mark.parametrize("kind", ["window", "sinks", "qwen2"])
def test_steps_in_trees(tmp_path: Path, gpu: DeviceMesh, kind: str) -> None:  # noqa: F811
    """In bf16: gradients of trees against those of the segments apart, beside those of two packings apart."""
    model = ModelConfig(path=str(saved(tmp_path, kind)), dtype="bfloat16")
    policy = policy_of(model, gpu, LEARNER.model_copy(update={"attention": "varlen"}))
    assert policy.sharing.key_room
    apart, control = (step(policy, budget, AlgorithmConfig(), trees=False) for budget in (400, 150))

    def far(a, b) -> tuple[float, float]:
        norm = [
            float((a.gradients[k].double() - g.double()).norm() / g.double().norm())
            for k, g in b.gradients.items()
            if g.norm() > 0 and "k_proj.bias" not in k
        ]
        return float((a.logprobs - b.logprobs).abs().max()), max(norm)

    limit = far(control, apart)
    for budget in (10**6, 120):
        shared = step(policy, budget, AlgorithmConfig(), trees=True)
        assert any(row.targets is not None for row in shared.batch.microbatches)
        found = far(shared, apart)
        assert found[0] < max(2.5 * limit[0], 0.03) and found[1] < max(2.5 * limit[1], 0.03)
