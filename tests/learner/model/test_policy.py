"""The policy's weights and scores, as the weights wire and the probe see them."""

from pathlib import Path

import pytest
import torch

from learner.model.microbatch import one_document
from tests.harness.world import LEARNER, plain, policy_of, tiny_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_weights(tmp_path: Path, mesh, tied: bool, dtype: torch.dtype) -> None:
    model = tiny_model(tmp_path, tied, dtype)
    policy, reference = policy_of(model, mesh), plain(model).state_dict()
    policy.logprobs_of([1, 2, 3])  # what a forward pass gathers is given back
    given = list(policy.full_weights())
    assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in given] == [
        tuple(s) for s in policy.weight_specs()
    ]
    assert all(torch.equal(tensor, reference[name]) for name, tensor in given)
    assert {name for name, _ in given} == reference.keys() - ({"lm_head.weight"} if tied else set())
    assert given[0][0] == "model.embed_tokens.weight"
    left = [name for name, _ in policy.full_weights(without={"model.embed_tokens.weight", "model.norm.weight"})]
    assert left == [name for name, _ in given if name not in ("model.embed_tokens.weight", "model.norm.weight")]
    assert all(p.dtype == torch.float32 for p in policy.parameters())


def test_logprobs_of_are_raw(tmp_path: Path, mesh) -> None:
    model = tiny_model(tmp_path)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    got = policy_of(model, mesh, temperature=0.3).logprobs_of(tokens)
    logp = plain(model)(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    want = logp.gather(-1, torch.tensor(tokens)[1:, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor(got), want, rtol=1e-5, atol=1e-5)


def test_bf16_computes_near_fp32(tmp_path: Path, mesh) -> None:
    model = tiny_model(tmp_path, dtype=torch.bfloat16)
    tokens = list(range(40))
    fine = policy_of(model.model_copy(update={"dtype": "float32"}), mesh).logprobs_of(tokens)
    coarse = policy_of(model, mesh).logprobs_of(tokens)
    difference = torch.tensor(fine) - torch.tensor(coarse)
    assert 0 < difference.abs().mean() < 0.05


def test_entropy(tmp_path: Path, mesh) -> None:
    model, tokens = tiny_model(tmp_path), [3, 1, 4, 1]
    _, entropy = policy_of(model, mesh, LEARNER, temperature=0.5)(one_document(tokens))
    logp = (plain(model)(torch.tensor([tokens])).logits[0, :-1] / 0.5).log_softmax(-1)
    torch.testing.assert_close(entropy, torch.cat([torch.zeros(1), -(logp.exp() * logp).sum(-1)]), rtol=1e-5, atol=1e-5)


def test_frozen_has_no_gradient(tmp_path: Path, mesh) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh, frozen=True)
    assert not any(parameter.requires_grad for parameter in policy.parameters())
    assert not policy(one_document([1, 2, 3]))[0].requires_grad
