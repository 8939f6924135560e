"""Every case of loss_vectors.json that we have: values and gradients, in float64 to 1e-6 and in float32 to 1e-4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from learner.algorithms.advantages import ADVANTAGES, group_mean, soft_overlong
from learner.algorithms.corrections import (
    behaviour_weight,
    log_linear_proximal,
    m2_limit,
    m2_squares,
    off_policy_sequences,
    outside_trust_region,
    reference_kl,
    tapered_weight,
)
from learner.algorithms.diagnostics import mismatch_sums, summary
from learner.algorithms.inputs import LossInputs, aggregation_weights
from learner.algorithms.losses import LOSSES

VECTORS = json.loads((Path(__file__).parent / "loss_vectors.json").read_text())
CASES, GIVEN = VECTORS["cases"], VECTORS["inputs"]
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
SAMPLED = torch.tensor(GIVEN["mask"]).bool().flatten()
GROUPS = torch.zeros(4, dtype=torch.int64)


@pytest.fixture(params=TOLERANCE, ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def flat(rows: list[list[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(rows, dtype=dtype).flatten()


def given(dtype: torch.dtype, **changes: Any) -> LossInputs:
    """The 4 x 5 batch of the vectors, packed as it stands: garbage at its unsampled positions included."""
    values = {
        "policy_logprobs": flat(GIVEN["logp_theta"], dtype).requires_grad_(),
        "behaviour": flat(GIVEN["logp_mu"], dtype),
        "advantages": torch.tensor(GIVEN["adv_seq"], dtype=dtype).repeat_interleave(5),
        "sampled": SAMPLED,
        "sequence": torch.arange(4).repeat_interleave(5),
        "num_sequences": 4,
        "num_tokens": 15,
        "reference": flat(GIVEN["logp_ref"], dtype),
        "versions": torch.tensor(GIVEN["versions"]).flatten(),
        "version": GIVEN["current_version"],
    }
    return LossInputs(**(values | changes))


def close(actual: Tensor, expected: Any, dtype: torch.dtype) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64).flatten()
    torch.testing.assert_close(actual.detach().double().flatten(), expected, rtol=0, atol=TOLERANCE[dtype])


def share(sums: dict[str, Tensor], what: str) -> float:
    return float(sums[f"positive/{what}"] + sums[f"negative/{what}"]) / 15


LOSS_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("ppo", "grpo_clip_sym/token_mean", {"clip_high": 0.2}),
    ("ppo", "grpo_clip_sym/seq_mean_token_mean", {"clip_high": 0.2, "aggregation": "sequence"}),
    ("ppo", "grpo_clip_sym/dr_grpo_L8", {"clip_high": 0.2, "aggregation": "constant", "constant_length": 8}),
    ("ppo", "dapo_clip_higher/token_mean", {}),
    ("gspo", "gspo/paper_eps", {"clip_low": 3e-4, "clip_high": 4e-4}),
    ("gspo", "gspo/wide_eps", {"aggregation": "sequence"}),
    ("cispo", "cispo/scalerl_0_5", {}),
    ("cispo", "cispo/cap2", {"is_cap": 2.0}),
    ("cispo", "aipo", {"is_cap": 2.0}),
    ("m2po", "m2po_paper/tau_004", {}),
    ("m2po", "m2po_paper/tau_03", {"m2_budget": 0.3}),
    ("dppo", "recommended_default", {}),
    ("dppo", "recommended_default_kl", {"behaviour_kl": 1e-3}),
    ("dppo", "dppo_tv_verl", {"is_cap": 20.0}),
    ("dppo", "cispo/cap2", {"is_cap": 2.0, "tv_low": None, "tv_high": None}),
    (
        "decoupled",
        "prox_interpolation/decoupled_loss_loglinear_nocap",
        {"proximal": "loglinear", "behaviour_cap": None, "clip_high": 0.2},
    ),
]


@pytest.mark.parametrize(("name", "case", "config"), LOSS_CASES, ids=[f"{n}-{c}" for n, c, _ in LOSS_CASES])
def test_loss(name: str, case: str, config: dict[str, Any], dtype: torch.dtype) -> None:
    expected: Any = CASES
    for key in case.split("/"):
        expected = expected[key]
    inputs = given(dtype)
    loss, _ = LOSSES[name](inputs, AlgorithmConfig(loss=name, **config))
    (gradient,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    close(loss, expected["loss"], dtype)
    close(gradient, expected["grad"], dtype)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("no_cap", {"behaviour_cap": None}),
        ("clamp_cap2", {"behaviour_cap": 2.0, "behaviour_mode": "clamp"}),
        ("mask_cap2", {"behaviour_cap": 2.0, "behaviour_mode": "mask"}),
    ],
)
def test_decoupled(case: str, config: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = given(dtype, proximal=flat(GIVEN["logp_prox"], dtype))
    loss, _ = LOSSES["decoupled"](inputs, AlgorithmConfig(loss="decoupled", clip_high=0.2, **config))
    (gradient,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    close(loss, CASES["decoupled_ppo"][case]["loss"], dtype)
    close(gradient, CASES["decoupled_ppo"][case]["grad"], dtype)


def test_dual_clip(dtype: torch.dtype) -> None:
    inputs = given(dtype, advantages=-given(dtype).advantages)
    loss, sums = LOSSES["ppo"](inputs, AlgorithmConfig(loss="ppo", clip_high=0.2, dual_clip=3.0))
    (gradient,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    close(loss, CASES["grpo_dual_clip_negA"]["token_mean"]["loss"], dtype)
    close(gradient, CASES["grpo_dual_clip_negA"]["token_mean"]["grad"], dtype)
    assert sums["negative/masked"] > 0


def test_shares_of_masked_and_capped_tokens() -> None:
    def sums(name: str, **config: Any) -> dict[str, Tensor]:
        return LOSSES[name](given(torch.float64), AlgorithmConfig(loss=name, **config))[1]

    assert share(sums("ppo", clip_high=0.2), "masked") == pytest.approx(CASES["grpo_clip_sym"]["clipfrac"])
    assert share(sums("ppo"), "masked") == pytest.approx(CASES["dapo_clip_higher"]["clipfrac"])
    assert share(sums("cispo", is_cap=2.0), "capped") == pytest.approx(CASES["cispo"]["cap2"]["clipfrac"])
    assert share(sums("dppo"), "masked") == pytest.approx(CASES["recommended_default"]["masked_frac"])
    assert share(sums("dppo"), "capped") == 0


def test_dppo_masks_what_prime_rl_masks(dtype: torch.dtype) -> None:
    outside = outside_trust_region(given(dtype).clean(), 0.2, 0.2)
    assert outside.tolist() == torch.tensor(CASES["prime_rl_default"]["is_masked"]).flatten().tolist()


def test_dppo_uncapped_has_the_gradient_of_prime_rl(dtype: torch.dtype) -> None:
    inputs = given(dtype)
    loss, _ = LOSSES["dppo"](inputs, AlgorithmConfig(is_cap=1e6, behaviour_kl=1e-3))
    close(torch.autograd.grad(loss, inputs.policy_logprobs)[0], CASES["prime_rl_default"]["grad"], dtype)


def test_m2po_trust_region_and_budget(dtype: torch.dtype) -> None:
    case, squares = CASES["m2po_paper"], m2_squares(given(dtype).clean())
    finite = squares[squares.isfinite()]
    assert finite.numel() == sum(map(sum, case["trust_region_tokens"]))
    for tau, expected in ((0.04, case["tau_004"]), (0.3, case["tau_03"])):
        close(finite.mean(), expected["m2_before"], dtype)
        for given_to in (squares, finite):  # what may not be dropped moves no limit
            close(finite[finite < m2_limit(given_to, tau)].mean(), expected["m2_after"], dtype)


def test_topr_token_weights_of_roll(dtype: torch.dtype) -> None:
    """ROLL takes each token as a sample of its own, and a reward above 0 as positive."""
    inputs = given(dtype, sequence=torch.arange(20)).clean()
    positive = torch.tensor(GIVEN["rewards"]).repeat_interleave(5) > 0
    weight = torch.where(SAMPLED, tapered_weight(inputs, positive)[0], 0)
    close(weight, CASES["topr_roll_token"]["weight"], dtype)
    loss = (-weight * inputs.advantages * inputs.policy_logprobs).sum() / 15
    close(loss, CASES["topr_roll_token"]["loss"], dtype)


def test_topr_sample_weights_of_the_paper(dtype: torch.dtype) -> None:
    inputs = given(dtype).clean()
    positive = torch.tensor(GIVEN["rewards"]).repeat_interleave(5) > 0
    close(tapered_weight(inputs, positive)[0][::5], CASES["topr_paper_seq_weight"], dtype)


def test_opsm(dtype: torch.dtype) -> None:
    case = CASES["opsm_deepseek_v32"]
    dropped = off_policy_sequences(given(dtype).clean(), case["delta"])
    assert (~dropped[::5]).tolist() == case["keep"]
    close(-given(dtype).clean().sequence_mean(log_ratio(dtype))[::5], case["seq_kl"], dtype)


def log_ratio(dtype: torch.dtype) -> Tensor:
    inputs = given(dtype).clean()
    return inputs.policy_logprobs - inputs.behaviour


def test_gspo_sequence_ratio(dtype: torch.dtype) -> None:
    close(given(dtype).clean().sequence_mean(log_ratio(dtype))[::5], CASES["gspo"]["seq_log_ratio"], dtype)


def test_log_linear_proximal(dtype: torch.dtype) -> None:
    close(log_linear_proximal(given(dtype).clean()), CASES["prox_interpolation"]["loglinear"], dtype)


def test_behaviour_weight(dtype: torch.dtype) -> None:
    proximal = torch.where(SAMPLED, flat(GIVEN["logp_prox"], dtype), 0)
    case = CASES["is_correction_prox_vs_mu"]
    clamped, beyond = behaviour_weight(proximal, given(dtype).clean().behaviour, "clamp", 2.0)
    close(torch.where(SAMPLED, clamped, 0), case["tis_token_cap2"], dtype)
    raw, _ = behaviour_weight(proximal, given(dtype).clean().behaviour, "mask", 2.0)
    close(torch.where(SAMPLED, raw, 0), case["token_ratio"], dtype)
    assert beyond.sum() == 1


def test_aggregation(dtype: torch.dtype) -> None:
    case = CASES["aggregation"]
    values = flat(case["mat"], dtype)
    inputs = given(dtype, num_prompts=2, prompt_tokens=torch.tensor([8, 8, 7, 7]).repeat_interleave(5)).clean()
    for ours, theirs in {"token": "token-mean", "sequence": "seq-mean-token-mean", "prompt": "prompt-mean"}.items():
        close((aggregation_weights(inputs, ours, None) * values).sum(), case[theirs], dtype)
    close((aggregation_weights(inputs, "constant", case["L"]) * values).sum(), case["dr-grpo"], dtype)
    close((aggregation_weights(inputs, "constant", 1) * values).sum() * 4, case["seq-mean-token-sum"] * 4, dtype)


@pytest.mark.parametrize(
    ("name", "case"),
    [("group_mean", "grpo_nostd"), ("group_std", "grpo_std_ddof1_eps1e6"), ("leave_one_out", "rloo")],
)
def test_advantage(name: str, case: str, dtype: torch.dtype) -> None:
    for rewards, expected in zip(CASES["advantages"]["rewards"], CASES["advantages"][case], strict=True):
        close(ADVANTAGES[name](torch.tensor(rewards, dtype=dtype), GROUPS), expected, dtype)


def test_advantage_batch_std(dtype: torch.dtype) -> None:
    """All three groups are one batch."""
    rewards = flat(CASES["advantages"]["rewards"], dtype)
    advantages = ADVANTAGES["batch_std"](rewards, torch.arange(3).repeat_interleave(4))
    close(advantages, CASES["advantages"]["batch_std_trl"], dtype)


def test_advantage_reinforce_baseline(dtype: torch.dtype) -> None:
    rewards, lengths = torch.tensor(GIVEN["rewards"], dtype=dtype), torch.tensor([5, 3, 3, 4])
    advantages = ADVANTAGES["reinforce_baseline"](rewards, GROUPS, lengths)
    expected = [row[0] for row in CASES["advantages"]["reinforce_pp_baseline_tokens"]]
    close(advantages, expected, dtype)


def test_zero_variance_gives_exactly_zero() -> None:
    rewards = torch.full((8,), 0.1)
    for name in ("group_mean", "group_std", "leave_one_out", "batch_std"):
        assert ADVANTAGES[name](rewards, torch.zeros(8, dtype=torch.int64)).eq(0).all(), name


def test_overlong(dtype: torch.dtype) -> None:
    """The punishment has a floor, as in the paper, which the case's last length is beyond."""
    case = CASES["overlong"]
    lengths = torch.tensor(case["lengths"])
    punished = soft_overlong(torch.zeros(6, dtype=dtype), lengths, case["max_len"], case["buffer"], case["factor"])
    close(punished, [max(value, -1.0) for value in case["penalty"]], dtype)


def test_mismatch(dtype: torch.dtype) -> None:
    case = CASES["mismatch_metrics"]
    for new, expected in (("logp_theta", case["theta_vs_mu"]), ("logp_prox", case["prox_vs_mu"])):
        metrics = summary(mismatch_sums(given(dtype, policy_logprobs=flat(GIVEN[new], dtype)).clean()))
        for ours, theirs in {
            "offpolicy/k1": "kl_k1",
            "offpolicy/k3": "kl_k3",
            "offpolicy/m2": "m2",
            "ess/token": "ess_token",
            "ess/sequence": "ess_seq",
            "ratio/max": "ratio_max",
            "ratio/mean": "ratio_mean",
        }.items():
            assert metrics[ours] == pytest.approx(expected[theirs], abs=TOLERANCE[dtype] * 10), ours


def test_reference_kl_has_the_importance_weighted_gradient(dtype: torch.dtype) -> None:
    """The same gradient as k3 times an undetached ratio, which is the corrected reverse KL."""
    inputs = given(dtype)
    zero = torch.zeros_like(inputs.advantages)
    config = AlgorithmConfig(loss="reinforce", reference_kl=1.0)
    loss, sums = LOSSES["reinforce"](given(dtype, policy_logprobs=inputs.policy_logprobs, advantages=zero), config)
    case = CASES["kl_estimators_theta_vs_ref"]
    close(torch.autograd.grad(loss, inputs.policy_logprobs)[0], case["k3_is_corrected"]["grad"], dtype)
    close(sums["reference/k3"] / 15, case["mean"]["k3"], dtype)


def test_reference_kl_has_the_gradient_of_the_kl(dtype: torch.dtype) -> None:
    """In expectation over a categorical policy, on-policy: the gradient of KL(pi | ref) with respect to its logits."""
    case = CASES["kl_gradient_categorical"]
    logits = torch.tensor(case["logits"], dtype=dtype, requires_grad=True)
    logprobs, reference = logits.log_softmax(0), torch.tensor(case["ref_logits"], dtype=dtype).log_softmax(0)
    expected = logprobs.detach().exp() @ reference_kl(logprobs, logprobs.detach(), reference, cap=5.0)
    close(torch.autograd.grad(expected, logits)[0], case["true_grad_logits"], dtype)


def test_group_mean_keeps_dtype(dtype: torch.dtype) -> None:
    assert group_mean(torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([7, 7])).dtype == dtype
