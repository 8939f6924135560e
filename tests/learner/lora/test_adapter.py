"""Adapters: gradients are peft's and do not depend on ranks or compilation; the base is the reference; what travels."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from configs.load import ConfigError
from configs.schema import AlgorithmConfig, LoraConfig
from learner.model.loading import blocks
from learner.model.lora.adapter import initial, without_adapter
from learner.model.lora.base import Base, digest
from learner.model.microbatch import one_document
from learner.weights.plan import LORA_A, LORA_B
from tests.harness import world
from tests.harness.adapters import LORA, adapted_model, peft_model, stir
from tests.harness.lanes import long_but
from tests.harness.pictured import form_of, make_pictured, seeing_model
from tests.harness.world import ALGORITHM, LEARNER, algorithm_of, cut, make_samples, plain, policy_of, tiny_model
from tests.learner.train.test_step import by_hand, close, gradient

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
LINEAR = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LINEAR += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def adapter_of(policy) -> dict[str, torch.Tensor]:
    """As it is now."""
    return {name: tensor.clone() for name, tensor in policy.adapter()}


def scores(model, tokens: list[int] = TOKENS) -> torch.Tensor:
    """Log-probabilities by transformers."""
    logp = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logp.gather(-1, torch.tensor(tokens)[1:, None]).squeeze(-1).detach()


def test_version_0_is_the_base_and_its_adapter_is_the_seeds(tmp_path: Path, mesh) -> None:
    model = adapted_model(tmp_path)
    policy, other = policy_of(model, mesh, seed=7), policy_of(model, mesh, seed=8)
    torch.testing.assert_close(torch.tensor(policy.logprobs_of(TOKENS)), scores(plain(model)), rtol=1e-5, atol=1e-5)
    for name, tensor in policy.adapter():
        if name.endswith(LORA_B):
            assert not tensor.any()
            continue
        bound = tensor.shape[1] ** -0.5
        assert 0.9 * bound < tensor.abs().max() <= bound and tensor.mean().abs() < bound / 5
        parameter = name.removesuffix(".weight")
        assert torch.equal(tensor, initial(parameter, tensor.shape, 7))
        assert not torch.equal(tensor, dict(other.adapter())[name])
    drawn = [x for name, x in policy.adapter() if name.endswith("q_proj" + LORA_A)]
    assert not torch.equal(*drawn)


def test_only_the_adapter_is_published(tmp_path: Path, mesh) -> None:
    """In the order of the layers, A before B, in `model.dtype`, B times alpha / rank."""
    policy = policy_of(adapted_model(tmp_path, dtype=torch.bfloat16), mesh)
    stir(policy)
    layers = [f"model.layers.{number}.{name}" for number in range(2) for name in LINEAR]
    given, exact = list(policy.full_weights()), dict(policy.adapter())
    assert [name for name, _ in given] == [layer + suffix for layer in layers for suffix in (LORA_A, LORA_B)]
    assert [(name, tuple(x.shape), x.dtype) for name, x in given] == [tuple(spec) for spec in policy.weight_specs()]
    for name, tensor in given:
        assert tensor.dtype == torch.bfloat16 and exact[name].dtype == torch.float32
        assert torch.equal(tensor, (exact[name] * (2.0 if name.endswith(LORA_B) else 1.0)).bfloat16())
    assert given[0][1].shape == (4, 64) and given[1][1].shape == (64, 4)
    assert policy.frozen_names() == frozenset()
    without = [name for name, _ in policy.full_weights(without={given[0][0]})]
    assert without == [name for name, _ in given[1:]]


def test_the_base_is_held_as_it_computes_and_the_adapter_in_float32(tmp_path: Path, mesh) -> None:
    policy = policy_of(adapted_model(tmp_path, dtype=torch.bfloat16), mesh)
    for name, parameter in policy.model.named_parameters():
        adapter = name.endswith(("lora_A", "lora_B"))
        assert parameter.requires_grad is adapter and parameter.dtype == (torch.float32 if adapter else torch.bfloat16)
    half = torch.tensor(policy.logprobs_of(TOKENS))
    fine = torch.tensor(policy_of(adapted_model(tmp_path), mesh).logprobs_of(TOKENS))
    assert (half - fine).abs().mean() < 0.05


def test_version_0_is_the_full_run_s_to_the_bit_however_far_a_token_lies(tmp_path: Path, mesh) -> None:
    """Rotary frequencies rounded to bfloat16 would turn a token at 500 by half a radian too much or too little."""
    model, tokens = adapted_model(tmp_path, dtype=torch.bfloat16), [1 + i % 60 for i in range(500)]
    adapted, full = (policy_of(m, mesh) for m in (model, model.model_copy(update={"lora": None})))
    assert adapted.logprobs_of(tokens) == full.logprobs_of(tokens)
    assert {x.dtype for x in adapted.model.buffers()} == {torch.float32}


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_pefts(tmp_path: Path, mesh, tied: bool) -> None:
    model = adapted_model(tmp_path, tied)
    policy = policy_of(model, mesh)
    stir(policy)
    algorithm = ALGORITHM.model_copy(update={"tv_low": None, "tv_high": None})
    theirs = peft_model(model, dict(policy.adapter()))
    ours = torch.tensor(policy.logprobs_of(TOKENS))
    torch.testing.assert_close(ours, scores(theirs), rtol=1e-5, atol=1e-5)
    assert (ours - scores(plain(model))).abs().max() > 0.1
    found, _ = gradient(policy, 64, algorithm)
    wanted = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): grad
        for name, grad in by_hand(theirs, make_samples(), algorithm.is_cap).items()
        if grad is not None
    }
    close(found, wanted)


@pytest.mark.parametrize("options", long_but([{}, {"loss": "gspo"}], 0), ids=str)
def test_packing_changes_nothing_and_a_dummy_reaches_the_adapter(tmp_path: Path, mesh, options: dict) -> None:
    """The head's two ways: differentiated in chunks, and at once with its logits computed again."""
    policy, algorithm = policy_of(adapted_model(tmp_path), mesh), AlgorithmConfig(**options)
    stir(policy)
    one, _ = gradient(policy, 10**6, algorithm)
    assert len(one) == 28 and all(g.norm() > 0 for g in one.values())
    close(one, gradient(policy, 30, algorithm)[0])
    close(one, gradient(policy, 64, algorithm, make_samples()[::-1])[0])


@pytest.mark.xdist_group("ranks")
def test_ranks_change_nothing(tmp_path: Path, mesh) -> None:
    """Two processes against this one: gradients, the adapter of version 0, the digest of the base, its scores."""
    model = adapted_model(tmp_path / "model", tied=True)
    policy = policy_of(model, mesh)
    first, of_base = adapter_of(policy), digest(policy.model, mesh)
    stir(policy)
    want, _ = gradient(policy, 64)
    world.together("adapted", 2, tmp_path, lora=LORA.model_dump(), cuts=[[20, 4], [24, 0]], tokens=TOKENS)
    found = torch.load(tmp_path / "adapted.pt")
    assert all(torch.equal(first[name], tensor) for name, tensor in found["first"].items())
    assert found["digest"] == of_base == digest(plain(model).requires_grad_(False))
    torch.testing.assert_close(found["base"], scores(plain(model)), rtol=1e-5, atol=1e-5)
    assert len(found["gradients"]) == 2
    for got in found["gradients"]:
        close(got, want)


def test_the_digest_is_of_every_weight_and_the_dtype(tmp_path: Path) -> None:
    model = plain(tiny_model(tmp_path)).requires_grad_(False)
    known = {digest(model)}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.view(-1)[0] += 1e-3
        known.add(digest(model))
    known.add(digest(model.bfloat16()))
    assert len(known) == len(list(model.parameters())) + 2


@pytest.mark.parametrize("saving", ["none", "selective", "block"])
def test_activation_checkpointing_changes_nothing(tmp_path: Path, mesh, saving: str) -> None:
    model, found = adapted_model(tmp_path), []
    for name in ("none", saving):
        policy = policy_of(model, mesh, LEARNER.model_copy(update={"activation_checkpointing": name}))
        stir(policy)
        found.append(gradient(policy, 64)[0])
    close(*found)


def test_compiled_is_eager(tmp_path: Path, mesh) -> None:
    """An adapted part of a block in one piece, with the adapter and, as the reference runs it, without."""
    policy, compiled = policy_of(adapted_model(tmp_path), mesh), CompileCounterWithBackend("aot_eager")
    stir(policy)
    block = blocks(policy.model)[0]
    block.unshard()
    mlp = block.mlp
    faster = torch.compile(mlp.forward, dynamic=True, fullgraph=True, backend=compiled)
    for tokens in (5, 9):
        x = torch.randn(tokens, 64)
        ours, theirs = ([y, *torch.autograd.grad(y.sin().sum(), [p for p in mlp.parameters() if p.requires_grad])]
                        for y in (faster(x), mlp(x)))  # fmt: skip
        torch.testing.assert_close(ours, theirs)
        with without_adapter(policy.model), torch.no_grad():
            torch.testing.assert_close(faster(x), mlp(x))
            assert (mlp(x) - theirs[0]).abs().max() > 0.01
    assert compiled.frame_count == 2  # one for each, whatever the length


def test_the_reference_is_the_base(tmp_path: Path, mesh) -> None:
    """The same penalty and gradient as with a second model of the initial weights."""
    model = adapted_model(tmp_path)
    algorithm = ALGORITHM.model_copy(update={"reference_kl": 0.5})
    policy = policy_of(model, mesh)
    stir(policy)
    copy = policy_of(model.model_copy(update={"lora": None}), mesh, frozen=True)
    row = policy.place(one_document(TOKENS))
    assert torch.equal(Base(policy).score(row), copy.score(row))
    assert (policy.score(row) - copy.score(row)).abs().max() > 0.1  # the adapter is on again
    (ours, sums), (theirs, others) = (gradient(policy, 64, algorithm, reference=r) for r in (Base(policy), copy))
    close(ours, theirs)
    assert sums["reference/k3"] > 0 and torch.equal(sums["reference/k3"], others["reference/k3"])


def test_the_adapter_is_on_again_after_an_error(tmp_path: Path, mesh) -> None:
    policy = policy_of(adapted_model(tmp_path), mesh)
    stir(policy)
    before = policy.logprobs_of(TOKENS)
    with pytest.raises(KeyError), without_adapter(policy.model):
        raise KeyError
    assert policy.logprobs_of(TOKENS) == before


def test_targets(tmp_path: Path, mesh) -> None:
    policy = policy_of(adapted_model(tmp_path, lora=LoraConfig(rank=1, targets=["v_proj", "down_proj"])), mesh)
    layers = {spec.name.removesuffix(LORA_A) for spec in policy.weight_specs() if spec.name.endswith(LORA_A)}
    assert {layer.rpartition(".")[2] for layer in layers} == {"v_proj", "down_proj"} and len(layers) == 4
    with pytest.raises(ConfigError) as error:
        policy_of(adapted_model(tmp_path, lora=LoraConfig(targets=["lm_head"])), mesh)
    assert str(error.value) == (
        "model.lora.targets: lm_head: linear layers of Qwen2ForCausalLM that can have an adapter are down_proj, "
        "gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; name some of these, or set all"
    )


def test_training_raises_what_is_rewarded_and_leaves_the_base(tmp_path: Path, mesh) -> None:
    policy = policy_of(adapted_model(tmp_path), mesh)
    step, entries = algorithm_of(policy, 64, AlgorithmConfig(loss="reinforce")), make_samples()
    of_base, before = digest(policy.model, mesh), adapter_of(policy)
    losses = [step.step(policy, cut(entries, 3, [len(entries)], 0))["loss"] for _ in range(4)]
    assert losses[-1] < losses[0] and digest(policy.model, mesh) == of_base
    assert not any(torch.equal(before[name], tensor) for name, tensor in policy.adapter())


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_of_a_vision_language_model_the_text_model_alone_is_adapted(tmp_path: Path, mesh, kind: str) -> None:
    model = seeing_model(tmp_path, kind).model_copy(update={"lora": LORA})
    policy, form = policy_of(model, mesh), form_of(seeing_model(tmp_path, kind))
    stir(policy)
    assert all(".language_model.layers." in spec.name for spec in policy.weight_specs())
    step, pictured = algorithm_of(policy, 256, form=form), make_pictured(form)
    figures = step.step(policy, pictured.part(3, [len(pictured.entries)], 0))
    assert figures["gradient/norm"] > 0 and figures["images"] > 0
    assert not any(p.requires_grad for p in policy.model.model.visual.parameters())
