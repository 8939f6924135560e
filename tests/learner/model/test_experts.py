"""Mixtures of experts in the policy: our router against transformers' and against arithmetic, FLOPs and memory of the
active experts, what is refused, one graph for a compiled block."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DogeConfig,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.load import ConfigError
from configs.schema import ModelConfig
from learner.model.experts.mixture import (
    Experts,
    Mixture,
    check_experts,
    has_expert_layers,
    has_experts,
    load_metrics,
)
from learner.model.experts.router import Router, Routing, tallied
from learner.model.flops import Costs, active_parameters
from learner.model.loading import build_on_meta
from learner.model.memory import GIB, META_ATTENTION, estimate, sizes_of
from learner.model.microbatch import one_document
from learner.train.batch import Batch
from tests.harness.certified import TINY
from tests.harness.expert_batches import SIZES, expert_model, random_routes, routed
from tests.harness.world import LEARNER, algorithm_of, cut, make_groups, plain, policy_of
from tests.learner.model.test_memory import kept_of

TOKENS = np.random.default_rng(0).integers(0, 64, 50).tolist()
SHAPES = [{}, {"norm_topk_prob": False}, {"mlp_only_layers": [0], "num_experts": 7}, {"num_experts_per_tok": 3}]


def qwen3_30b_a3b(folder: Path) -> ModelConfig:
    """The config of Qwen3-30B-A3B, without weights."""
    shape: Any = Qwen3MoeConfig
    config = shape(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype="bfloat16")


def router_of(top_k: int = 2, normalised: bool = True, dtype: torch.dtype = torch.float32) -> Router:
    """A random router of 8 experts."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 32, generator=draw).to(dtype))
    theirs = type("Theirs", (), {"weight": weight, "top_k": top_k, "norm_topk_prob": normalised})
    return Router(theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logprobs_are_transformers(tmp_path: Path, mesh, shape: dict) -> None:
    model = expert_model(tmp_path, **shape)
    logp = plain(model)(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    want = logp.gather(-1, torch.tensor(TOKENS)[1:, None]).squeeze(-1)
    policy = policy_of(model, mesh)
    assert policy.mixture.sizes == Experts(2 - len(shape.get("mlp_only_layers", [])), *{
        "number": shape.get("num_experts", 8), "top_k": shape.get("num_experts_per_tok", 2)}.values())  # fmt: skip
    torch.testing.assert_close(torch.tensor(policy.logprobs_of(TOKENS)), want.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_router_of_a_bfloat16_model_computes_in_float32(normalised: bool) -> None:
    """Against float64 with the rounded weight, which is the server's; transformers rounds logits and weights too."""
    router = router_of(normalised=normalised, dtype=torch.bfloat16)
    hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits, weights, ids = router(hidden)
    exact = hidden.double() @ router.weight.double().T
    probabilities = exact.softmax(-1).gather(-1, ids)
    want = probabilities / probabilities.sum(-1, keepdim=True) if normalised else probabilities
    assert logits.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.equal(ids, exact.topk(2).indices)
    rounded = (hidden @ router.weight.T).double()
    assert (rounded - exact).abs().max() > 1e-3


@pytest.mark.parametrize("normalised", [True, False])
def test_replayed_weights_have_the_gradient_of_the_softmax(normalised: bool) -> None:
    """For ids that the router would not choose, by central differences in float64."""
    router = router_of(3, normalised).double()
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    routes = torch.randint(8, (5, 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    router.routing = Routing(torch.ones(5, dtype=torch.bool), routes, None)

    def weights(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(router, {"weight": weight}, hidden)[1]

    assert torch.equal(router(hidden)[2], routes.long())
    assert torch.autograd.gradcheck(weights, (hidden, router.weight))


def test_an_expert_that_the_router_would_never_take_has_a_weight() -> None:
    """Its probability is 0 in float32, and so is that of the others: their share of each other is not 0 / 0."""
    router = router_of()
    with torch.no_grad():
        router.weight.mul_(1000)
    router.routing = Routing(torch.ones(1, dtype=torch.bool), torch.tensor([[2, 2]]), None)
    hidden = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    weights = router(hidden.requires_grad_())[1]
    weights.square().sum().backward()
    assert weights.tolist() == [[0.5, 0.5]] and hidden.grad.isfinite().all()


def test_a_tally_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 5.0], [9.0, 0.0, 0.0]])
    ids, own = torch.tensor([[0, 1], [0, 1], [1, 2]]), torch.tensor([[0, 1], [2, 0], [0, 1]])
    found = tallied(logits, ids, own, torch.tensor([True, True, False]))
    entropies = torch.distributions.Categorical(logits=logits[:2]).entropy()
    assert found.tolist() == pytest.approx([2, 2, 0, float(entropies.sum()), 3, 2])
    metrics = load_metrics(torch.stack([found, found]), Experts(2, 3, 2), replayed=True)
    assert metrics == pytest.approx({
        "moe/load_max_over_mean": 1.5, "moe/experts_unused": 1 / 3,
        "moe/router_entropy": float(entropies.mean()), "moe/routes_agree": 0.75,
    })  # fmt: skip
    assert "moe/routes_agree" not in load_metrics(found[None], Experts(1, 3, 2), replayed=False)


@pytest.mark.parametrize("config", [MixtralConfig(), GptOssConfig(), NemotronHConfig()], ids=lambda c: c.model_type)
def test_routes_of_other_mixtures_are_not_replayed(config) -> None:
    check_experts(config, "M", replay=False)
    problem = (
        rf"routing_replay: true, and model.path M is of type {config.model_type}; the learner replays routes of qwen3_"
    )
    with pytest.raises(ConfigError, match=problem):
        check_experts(config, "M", replay=True)


@pytest.mark.parametrize(
    "config",
    [DogeConfig(), NemotronHConfig(layers_block_type=["mamba", "attention", "mlp"])],
    ids=lambda c: c.model_type,
)
def test_a_dense_model_whose_config_counts_experts_is_no_mixture(config) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        check_experts(config, "M", replay=True)


def test_replay_without_experts_is_refused() -> None:
    check_experts(Qwen3MoeConfig(), "M", replay=True)
    check_experts(Qwen2Config(), "M", replay=False)
    with pytest.raises(
        ConfigError, match=r"^rollout.routing_replay: true, and model.path M has no experts; set it to f"
    ):
        check_experts(Qwen2Config(), "M", replay=True)


def test_30b_a3b(tmp_path: Path) -> None:
    """Its parameters are the publisher's: 30.5 billion, 3.3 of them active."""
    model = qwen3_30b_a3b(tmp_path)
    empty = build_on_meta(model, META_ATTENTION)
    assert empty.num_parameters() == 30_532_122_624
    assert active_parameters(empty) == 3_353_032_704
    embedded = 151_936 * 2048  # looked up, not multiplied
    assert Costs.of(empty).per_token == pytest.approx(6 * (active_parameters(empty) - 2 * embedded), rel=1e-3)
    learner = LEARNER.model_copy(update={"activation_checkpointing": "block", "head_chunk_tokens": 1024})
    for ranks, gib in ((8, 67.8), (4, 124.6)):
        assert estimate(model, learner, ranks).total(8192) / GIB == pytest.approx(gib, abs=1.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_formula_counts_what_torch_multiplies(tmp_path: Path, mesh, shape: dict) -> None:
    """In float32, where the product is counted expert by expert; all tokens scored."""
    model, n = plain(expert_model(tmp_path, **shape)), 48
    model.set_experts_implementation("eager")
    costs = Costs.of(model)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, n, dtype=torch.int64)).logits.sum().backward()
    attention = 2 * costs.per_pair * n * n
    want = costs.per_token * n + costs.per_trainable * n + attention
    assert counter.get_total_flops() == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize(("dtype", "off"), [("bfloat16", 0.25), ("float32", 0.6)])
@pytest.mark.parametrize("saving", ["none", "block"])
def test_activations_are_what_autograd_keeps(tmp_path: Path, mesh, saving: str, dtype: str, off: float) -> None:
    """In float32 the estimate doubles what it is in bfloat16, where norms and routers keep float32 already."""
    model = expert_model(tmp_path, dtype=dtype)
    learner = LEARNER.model_copy(update={"activation_checkpointing": saving})
    hidden = 3 * sizes_of(model).width  # the head's, which no block keeps
    ours = estimate(model, learner, 1).candidates[0].per_token["activations"] - hidden
    kept = kept_of(model, mesh, saving)
    assert 0.75 * kept < ours < (1 + off) * kept


def test_selective_checkpointing_repeats_no_product_of_experts(tmp_path: Path, mesh) -> None:
    model, counts = expert_model(tmp_path), {}

    class GroupedCount(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func is torch.ops.aten._grouped_mm.default
            return func(*args, **(kwargs or {}))

    for saving in ("none", "selective", "block"):
        policy = policy_of(model, mesh, LEARNER.model_copy(update={"activation_checkpointing": saving}))
        scores = policy(one_document([1, 2, 3, 4]))[0]
        with GroupedCount() as count:
            scores.sum().backward()
        counts[saving] = count.number
    assert counts["selective"] == counts["none"] == 8 and counts["block"] > 8


@pytest.mark.long
def test_a_block_is_captured_as_one_graph(tmp_path: Path, mesh) -> None:
    """In bfloat16, with routes to replay, for rows of several lengths; the long test checks the graph's results."""
    model, sizes = expert_model(tmp_path, dtype="bfloat16", num_hidden_layers=1), Experts(1, 8, 2)
    entries = routed(make_groups(), partial(random_routes, sizes=sizes))
    policy = policy_of(model, mesh, replay=True)
    torch._dynamo.reset()
    counters.clear()
    (layer,) = policy.model.model.layers
    layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, backend="eager")
    part = cut(entries, 3, [len(entries)], 0)
    batch = Batch.from_part(part, 150, policy.costs.quadratic, True, replayed=sizes)
    assert len(batch.microbatches) > 2
    for row in batch.microbatches:
        assert policy.score(policy.place(row)).isfinite().all()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2, "one more for the first row, whose routes begin a storage"


@pytest.mark.long
def test_a_compiled_block_is_one_graph_and_does_as_not_compiled(tmp_path: Path, mesh) -> None:
    """In bfloat16, whose products of experts the compiler takes: rows of several lengths with routes, blocks
    recomputed; the tallies too are those of the policy that is not compiled."""
    model, entries = expert_model(tmp_path, dtype="bfloat16"), routed(make_groups())
    learner = LEARNER.model_copy(update={"activation_checkpointing": "block"})
    torch._dynamo.reset()
    counters.clear()
    found = []
    for compiled in (False, True):
        policy = policy_of(model, mesh, learner, replay=True)
        for layer in policy.model.model.layers if compiled else ():
            layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, backend="aot_eager")
        algorithm = algorithm_of(policy, 150)
        part = cut(entries, 3, [len(entries)], 0)
        batch = Batch.from_part(part, 150, policy.costs.quadratic, True, replayed=SIZES)
        assert all(row.shared for row in batch.microbatches) and len(batch.microbatches) > 2
        sums = algorithm.backward(policy, batch)
        found.append((sums["moe"], [p.grad.full_tensor() for p in policy.model.parameters()]))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 3, "one more for the first layer, whose routes begin a storage"
    (tally, gradients), (compiled_tally, compiled_gradients) = found
    torch.testing.assert_close(tally, compiled_tally, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(gradients, compiled_gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-2 * ours.norm()


def test_a_dense_model_has_no_mixture() -> None:
    with torch.device("meta"):
        dense = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, mlp_only_layers=[0], vocab_size=64))
    assert Mixture.of(dense) is None and active_parameters(dense) == dense.num_parameters()


DENSE_NEMOTRON = {"layers_block_type": ["mamba", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1}


@pytest.mark.parametrize(
    ("kind", "fields", "mixed"),
    [
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32}, True),
        ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [0, 1]}, False),
        ("deepseek_v3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, True),
        ("deepseek_v3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}, False),
        ("nemotron_h", DENSE_NEMOTRON | {"n_routed_experts": 4, "num_hidden_layers": ...}, False),
        ("gemma4_text", {"num_experts": 4, "enable_moe_block": False}, False),
        ("granitemoehybrid", {"num_local_experts": 0, "layers_block_type": ["attention"] * 2}, False),
        ("doge", {"is_moe": True, "num_experts": 4}, True),
        ("doge", {"is_moe": False, "num_experts": 4}, False),
        ("qwen3", {}, False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_layers_of_a_model_tell_whether_it_is_a_mixture(kind: str, fields: dict[str, Any], mixed: bool) -> None:
    """`has_experts`, which reads the config alone, agrees. Dense models but the last count experts, or their family
    has them."""
    config = AutoConfig.for_model(kind, **{key: x for key, x in (TINY | fields).items() if x is not ...})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert (has_expert_layers(model), has_experts(config)) == (mixed, mixed)
