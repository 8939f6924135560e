"""`learner.matmul: fp8`: the three products of a linear layer, which layers have them, and which models are refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from configs.load import ConfigError
from configs.schema import LearnerConfig, ModelConfig
from learner.model import float8
from learner.model.float8 import Float8Linear
from learner.model.loading import build_on_meta
from learner.model.memory import META_ATTENTION, estimate
from learner.train.batch import Batch
from tests.harness import shared_rows, world
from tests.harness.expert_batches import expert_model
from tests.harness.pictured import seeing_model
from tests.harness.world import ALGORITHM, LEARNER, algorithm_of, cut, make_groups, policy_of, tiny_model

FP8 = LEARNER.model_copy(update={"matmul": "fp8"})
TOKENS, INNER, OUTER = 37, 64, 48
"""16 does not divide the number of tokens."""
Products = tuple[Tensor, Tensor, Tensor]


def rounded(x: Tensor, dim: int) -> Tensor:
    """`x` as FP8 has it, with one scale along `dim`: float64. By hand, without `float8.py`."""
    scale = x.double().abs().amax(dim, keepdim=True) / 448
    scale = torch.where(scale == 0, 1, scale)
    exponent = (x.double() / scale).abs().clamp(min=2**-6).log2().floor()
    step = 2.0 ** (exponent - 3)  # three bits of mantissa
    return ((x.double() / scale) / step).round() * step * scale


@pytest.fixture(scope="module")
def factors() -> Products:
    """x, weight and the gradient of the output; rows and columns differ in size by factors of up to 1,000."""
    draw = torch.Generator().manual_seed(0)
    sizes = (TOKENS, INNER), (OUTER, INNER), (TOKENS, OUTER)
    x, weight, grad = (torch.randn(*size, generator=draw) for size in sizes)
    spread = torch.logspace(-3, 0, TOKENS)[:, None]
    return x * spread, weight, grad * spread.flip(0)


def computed(layer: nn.Module, x: Tensor, grad: Tensor) -> Products:
    """Output, and the gradients of input and weight."""
    x = x.clone().requires_grad_()
    out = layer(x[None])[0]
    return out.detach(), *torch.autograd.grad(out, (x, layer.weight), grad)


def layer_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(INNER, OUTER, bias=bias is not None)
    layer.weight.data = weight.clone()
    if bias is not None:
        layer.bias.data = bias
    layer.__class__ = Float8Linear
    return layer


def test_each_product_is_of_factors_rounded_along_the_sum(factors: Products) -> None:
    x, weight, grad = factors
    out, grad_x, grad_weight = computed(layer_of(weight), x, grad)
    want = rounded(x, 1) @ rounded(weight, 1).T, rounded(grad, 1) @ rounded(weight, 0)
    for ours, theirs in zip((out, grad_x), want, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    theirs = rounded(grad, 0).T @ rounded(x, 0)
    torch.testing.assert_close(grad_weight.double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def test_products_are_off_by_a_few_percent_in_every_row(factors: Products) -> None:
    """Also in rows a thousand times smaller than others, which one scale for all would lose."""
    x, weight, grad = (each.bfloat16() for each in factors)
    out, grad_x, grad_weight = computed(layer_of(weight), x, grad)
    exact = x.double() @ weight.double().T, grad.double() @ weight.double(), grad.double().T @ x.double()
    for ours, theirs in zip((out, grad_x, grad_weight), exact, strict=True):
        off = (ours.double() - theirs).norm(dim=1) / theirs.norm(dim=1)
        assert 0.005 < off.mean() < 0.06 and off.max() < 0.1


def test_a_bias_is_added_as_it_is(factors: Products) -> None:
    x, weight, _ = factors
    bias = torch.linspace(-9, 9, OUTER)
    plain, more = layer_of(weight)(x), layer_of(weight, bias)(x)
    torch.testing.assert_close(more, plain + bias)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stays_so(factors: Products, value: float) -> None:
    """So that the step is skipped as it is in bfloat16."""
    x, weight, grad = (each.clone() for each in factors)
    x[3, 5], grad[7, 2] = value, value
    out, grad_x, grad_weight = computed(layer_of(weight), x, grad)
    assert not out[3].isfinite().any() and out[4].isfinite().all()
    assert not grad_x[7].isfinite().any() and grad_x[8].isfinite().all()
    assert not grad_weight[:, 5].isfinite().any() and not grad_weight[2].isfinite().any()


def test_zeros_are_zeros(factors: Products) -> None:
    x, weight, grad = factors
    products = computed(layer_of(0 * weight), 0 * x, 0 * grad)
    assert not any(product.any() for product in products)


def test_layers_of_other_sizes_and_the_head_stay(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    config = Qwen2Config.from_pretrained(tmp_path, intermediate_size=104)
    with torch.device("meta"):
        built = Qwen2ForCausalLM(config)
    assert float8.convert(built) == 2 * 4  # queries, keys, values and output; 16 does not divide 104
    kinds = {name.rpartition(".")[2]: type(module) for name, module in built.named_modules()}
    assert kinds["q_proj"] is kinds["o_proj"] is Float8Linear
    assert kinds["down_proj"] is kinds["lm_head"] is nn.Linear
    assert float8.convert(build_on_meta(model, META_ATTENTION)) == 2 * 7


def test_unproven_models_are_refused_by_name(tmp_path: Path) -> None:
    experts = build_on_meta(expert_model(tmp_path / "experts"), META_ATTENTION)
    with pytest.raises(ConfigError, match=r"learner\.matmul: fp8: Qwen3MoeForCausalLM has experts, whose products"):
        float8.convert(experts)
    seeing = build_on_meta(seeing_model(tmp_path / "seeing", "qwen3_vl"), META_ATTENTION)
    assert float8.why_not(seeing).endswith("reads images, with which it is not tested")
    tiny_model(tmp_path)
    with torch.device("meta"):
        odd = Qwen2ForCausalLM(Qwen2Config.from_pretrained(tmp_path, hidden_size=56, num_attention_heads=2))
    assert float8.why_not(odd) == "the blocks of Qwen2ForCausalLM have no linear layers with sizes that 16 divides"


def test_the_cpu_is_refused() -> None:
    line = "learner.matmul: fp8 needs a GPU with compute capability 8.9 or later, and the learner is on cpu; set lear"
    with pytest.raises(ConfigError) as refused:
        float8.check_device(FP8, torch.device("cpu"))
    assert refused.value.problems[0].startswith(line)
    float8.check_device(LEARNER, torch.device("cpu"))
    float8.check_device(FP8, torch.device("cuda"))  # a process that must not touch the GPU: its ranks ask


def gradients(model: ModelConfig, mesh, learner: LearnerConfig) -> dict[str, Tensor]:
    """Gradients of one batch of groups, whose prompts are shared if `learner` says so."""
    policy, entries = policy_of(model, mesh, learner), make_groups()
    step = algorithm_of(policy, 161, ALGORITHM.model_copy(update={"tv_low": None, "tv_high": None}))  # a smooth loss
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), 161, policy.costs.quadratic, policy.sharing.prompts)
    step.backward(policy, batch)
    return world.gradients(policy)


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    apart = sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs)
    return (apart / sum(float(each.square().sum()) for each in theirs.values())) ** 0.5


def test_a_step_is_near_and_the_same_however_it_is_computed(tmp_path: Path, mesh) -> None:
    """Recomputation and gathering once change nothing; shared prompts are other sums, and so other roundings."""
    model = tiny_model(tmp_path)
    exact, ours = gradients(model, mesh, LEARNER), gradients(model, mesh, FP8)
    assert 0.01 < distance(ours, exact) < 0.5
    other = {"activation_checkpointing": "none", "gather": "batch"}
    again = gradients(model, mesh, FP8.model_copy(update=other))
    assert distance(again, ours) < 1e-5
    unshared = gradients(model, mesh, FP8.model_copy(update={"share_prompts": False}))
    assert 0 < distance(unshared, ours) < 0.1


def test_casts_are_counted_in_the_memory_estimate(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    block = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96  # q, k and v, o, gate and up and down
    outputs = 64 + 2 * 32 + 64 + 2 * 96 + 64
    plain, fp8 = (estimate(model, learner, 1).candidates[1] for learner in (LEARNER, FP8))
    assert fp8.fixed["casts to FP8"] == 2 * block and fp8.per_token["casts to FP8"] == 2 * outputs + 96
    assert fp8.total(100) - plain.total(100) == 2 * block + 100 * (2 * outputs + 96)


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_ranks_that_share_rows_train_near_one_rank(tmp_path: Path) -> None:
    """Sharded, and each with half of every row."""
    shared_rows.write_models(tmp_path)
    case = {"model": "qwen3", "batch": "groups", "budget": 161, "copied": 0.0}
    with world.alone():
        (exact,) = shared_rows.compute(tmp_path, [case], 1)
    world.together("share_rows", 2, tmp_path, cases=[case | {"learner": {"matmul": "fp8"}}], size=2)
    for rank in range(2):
        (found,) = torch.load(tmp_path / f"shared_rows-{rank}.pt")
        assert 0.01 < distance(found["gradients"], exact["gradients"]) < 0.4


@pytest.mark.long
def test_compiled_layers_compute_the_same(factors: Products) -> None:
    x, weight, grad = (each.bfloat16() for each in factors)
    layer = layer_of(weight)
    compiled = torch.compile(layer, dynamic=True)
    compiled.weight = layer.weight
    for ours, theirs in zip(computed(compiled, x, grad), computed(layer, x, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))
