"""Every `learner.gather` takes the step that `pass` takes, some with fewer collectives, and leaves shards alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from configs.schema import AlgorithmConfig, ModelConfig
from learner.certify.certifier import write_copy
from learner.model.lora.base import Base
from learner.model.microbatch import one_document
from learner.train.batch import Batch
from tests.harness import world
from tests.harness.adapters import adapted_model, stir
from tests.harness.expert_batches import expert_model
from tests.harness.pictured import form_of, make_pictured, seeing_model
from tests.harness.world import ALGORITHM, GATHERS, LEARNER, algorithm_of, cut, make_samples, policy_of, tiny_model
from tests.learner.train.test_step import close

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


@dataclass
class GatherCase:
    """What is trained, and how: `kind` of model; options of algorithm and learner; frozen parts."""

    kind: str = "text"
    algorithm: dict[str, Any] = field(default_factory=dict)
    learner: dict[str, Any] = field(default_factory=dict)
    freeze: list[str] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    """In others FSDP adds up gradients of its own, in float32."""

    def model(self, folder: Path) -> ModelConfig:
        made = {"text": tiny_model, "adapter": adapted_model}.get(self.kind)
        if made:
            return made(folder, dtype=self.dtype)
        if self.kind == "text alone":
            written = ModelConfig(path="gemma3", text_alone=True)
            model = write_copy(AutoConfig.for_model("gemma3"), written, folder)
        else:
            model = expert_model(folder) if self.kind == "experts" else seeing_model(folder, "qwen3_vl")
        name = str(self.dtype).removeprefix("torch.")
        return model.model_copy(update={"freeze": self.freeze, "dtype": name})


CASES = {
    "text": GatherCase(),
    "bfloat16": GatherCase(dtype=torch.bfloat16),
    "first pass": GatherCase(algorithm={"loss": "m2po", "m2_budget": 0.01}),
    "no checkpointing": GatherCase(learner={"activation_checkpointing": "none"}),
    "selective": GatherCase(learner={"activation_checkpointing": "selective"}),
    "adapter": GatherCase("adapter"),
    "adapter's base": GatherCase("adapter", algorithm={"reference_kl": 0.5}),
    "reference": GatherCase(algorithm={"reference_kl": 0.5}),
    "tower": GatherCase("seeing"),
    "frozen tower": GatherCase("seeing", freeze=["vision"]),
    "frozen": GatherCase("seeing", freeze=["vision", "projector"]),
    "experts": GatherCase("experts"),
    "idle tower": GatherCase("text alone", dtype=torch.bfloat16),
}
FAST = (
    "text",
    "first pass",
    "selective",
    "adapter's base",
    "reference",
    "frozen tower",
    "experts",
    "adapter, bfloat16",
    "idle tower",
)
"""The cases of the fast tests."""
HALF = ("adapter", "adapter's base", "tower", "frozen tower", "frozen", "experts")
CASES |= {f"{name}, bfloat16": replace(CASES[name], dtype=torch.bfloat16) for name in HALF}


def groups_of(state: Any) -> list[Any]:
    """FSDP's groups of a module's parameters: until torch 2.12 there was one."""
    return state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]


def sharded(policy) -> bool:
    """Whether every parameter is a shard, in every module and in FSDP's own state, and nothing gathered has storage."""
    groups = [
        group
        for module in policy.modules()
        if isinstance(module, FSDPModule)
        for group in groups_of(module._get_fsdp_state())
    ]
    gathered = [whole for group in groups for each in group.fsdp_params for whole in each.all_gather_outputs]
    assert len(groups) > 2
    return (
        all(isinstance(parameter, DTensor) for parameter in policy.parameters())
        and all(group.is_sharded for group in groups)
        and not any(whole.untyped_storage().nbytes() for whole in gathered)
    )


def gathered(policy) -> list[bool]:
    """Whether each block of the text model is gathered, and the embedding."""
    decoder = policy.model.get_decoder()
    return [not isinstance(next(part.parameters()), DTensor) for part in (*decoder.layers, decoder.embed_tokens)]


def gradients(case: GatherCase, model: ModelConfig, mesh, gather: str) -> dict[str, torch.Tensor]:
    """Gradients of two batches in several microbatches each, with a step between them; each leaves shards alone."""
    learner = LEARNER.model_copy(update={"gather": gather} | case.learner)
    policy = policy_of(model, mesh, learner)
    if model.lora:
        stir(policy)
    config = ALGORITHM.model_copy(update=case.algorithm)
    reference = None
    if config.reference_kl:
        reference = Base(policy) if model.lora else policy_of(model, mesh, learner, frozen=True)
    form = form_of(model) if case.kind == "seeing" else None
    step = algorithm_of(policy, 60, config, reference=reference, form=form)
    found = {}
    for version in (3, 4):
        entries = make_samples(version)
        part = make_pictured(form, version).part(version, [15], 0) if form else cut(entries, version, [24], 0)
        batch = Batch.from_part(part, 60, policy.costs.quadratic, True, form, policy.costs.patch_cost)
        assert len(batch.microbatches) > 2
        step.backward(policy, batch)
        assert sharded(policy)
        assert reference is None or sharded(reference.policy if isinstance(reference, Base) else reference)
        found |= {f"{version} {name}": gradient for name, gradient in world.gradients(policy).items()}
        step.optimizer.update(version)
        assert len(policy.logprobs_of(TEXT)) == len(TEXT) - 1 and sharded(policy)
        assert len(list(policy.full_weights())) == len(policy.weight_specs())
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.long) for name in CASES])
def test_a_step_is_the_same(tmp_path: Path, mesh, name: str) -> None:
    case = CASES[name]
    model = case.model(tmp_path)
    each, *others = (gradients(case, model, mesh, gather) for gather in ("pass", 1, "batch"))
    assert any(gradient.norm() > 0 for gradient in each.values())
    for other in others:
        assert each.keys() == other.keys()
        first, second = ({key: x for key, x in other.items() if key[0] == version} for version in "34")
        if case.dtype == torch.float32:
            moving = {key: x for key, x in second.items() if "k_proj.bias" not in key}  # its gradient is rounding alone
            close(first, {key: each[key] for key in first}, 1e-6)
            close(moving, {key: each[key] for key in moving}, 1e-4)  # after a step of Adam
        else:
            close(first, {key: each[key] for key in first}, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("gather", GATHERS)
def test_compiled_blocks_stay_gathered_too(tmp_path: Path, mesh, gather: str | int) -> None:
    """One backend of the compiler, without code generation: what it compiled holds for weights gathered anew."""
    torch._dynamo.reset()
    policy = policy_of(tiny_model(tmp_path), mesh, LEARNER.model_copy(update={"gather": gather}))
    for block in policy.model.model.layers:
        block.forward = torch.compile(block.forward, dynamic=True, backend="aot_eager")
    plain = policy_of(tiny_model(tmp_path), mesh)
    for each in (policy, plain):
        part = cut(make_samples(), 3, [24], 0)
        algorithm_of(each, 60).backward(each, Batch.from_part(part, 60, each.costs.quadratic))
    close(world.gradients(policy), world.gradients(plain))
    assert sharded(policy)


@pytest.mark.parametrize("gather", GATHERS)
def test_weights_stay_until_the_last_backward_pass(tmp_path: Path, mesh, gather: str | int) -> None:
    """Scores within the batch, the reference's and a first pass, leave them as they are: with `batch` all weights, with
    a number the last so many blocks' and those outside of the blocks."""
    policy = policy_of(adapted_model(tmp_path), mesh, LEARNER.model_copy(update={"gather": gather}))
    step = algorithm_of(policy, 60, ALGORITHM.model_copy(update={"reference_kl": 0.1}), reference=Base(policy))
    batch = Batch.from_part(cut(make_samples(), 3, [24], 0), 60)
    shared = step.shared_context(batch, policy.device)
    none = [False] * 3
    stay = {"pass": none, 0: [False, False, True], 1: [False, True, True], "batch": [True] * 3}[gather]
    assert gathered(policy) == none
    with policy.gathering.held():
        policy.score(batch.microbatches[0])
        assert gathered(policy) == stay
        for microbatch in batch.microbatches:
            last = microbatch is batch.microbatches[-1]
            policy.gathering.reduce_after_next(last)
            step.backward_of(policy, microbatch, shared)
            assert gathered(policy) == (none if last else stay)
    assert sharded(policy)
    policy.score(batch.microbatches[0])
    assert sharded(policy)


@pytest.mark.parametrize("gather", GATHERS)
def test_a_batch_that_ends_between_two_passes_leaves_shards(tmp_path: Path, mesh, gather: str | int) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh, LEARNER.model_copy(update={"gather": gather}))
    with pytest.raises(KeyError), policy.gathering.held():
        policy.score(one_document(TEXT))
        raise KeyError
    policy.score(one_document(TEXT))
    assert sharded(policy)


def test_a_backward_pass_alone_is_a_last_one(tmp_path: Path, mesh) -> None:
    model, found = tiny_model(tmp_path), []
    for gather in GATHERS:
        policy = policy_of(model, mesh, LEARNER.model_copy(update={"gather": gather}))
        policy(one_document(TEXT))[0].sum().backward()
        assert sharded(policy)
        found.append(world.gradients(policy))
    assert len(found[0]) == len(list(policy.parameters()))
    for other in found[1:]:
        close(found[0], other, 1e-6)


@pytest.mark.parametrize("gather", GATHERS)
def test_a_reference_gathers_for_each_pass(tmp_path: Path, mesh, gather: str | int) -> None:
    """It has no backward pass, whose end would be that of the batch."""
    reference = policy_of(tiny_model(tmp_path), mesh, LEARNER.model_copy(update={"gather": gather}), frozen=True)
    with reference.gathering.held():
        reference.score(one_document(TEXT))
        assert sharded(reference)


SHARDS = {"text": 2, "first pass": 2, "adapter's base": 2, "frozen tower": 2, "experts": 2, "copies": 1,
          "bfloat16": 2, "adapter's base, bfloat16": 2, "experts, bfloat16": 2,
          "tower, bfloat16": 2}  # fmt: skip


def cases_on_ranks(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what the ranks need for each of `names`, of SHARDS."""
    for name in names:
        case = CASES.get(name, CASES["text"])
        model = case.model(folder / name)
        algorithm = AlgorithmConfig.model_validate(ALGORITHM.model_dump() | case.algorithm).model_dump(mode="json")
        yield {"model": model.model_dump(mode="json"), "algorithm": algorithm, "shards": SHARDS[name]}


@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("first pass", "adapter's base", "copies", "experts, bfloat16"), id="few"),
        pytest.param([*SHARDS][:4], id="first", marks=pytest.mark.long),
        pytest.param([*SHARDS][4:9], id="others", marks=pytest.mark.long),
        pytest.param([*SHARDS][9:], id="tower", marks=pytest.mark.long),
    ],
)
def test_ranks_gather_and_reduce_once(tmp_path: Path, mesh, names: Sequence[str]) -> None:
    """Two ranks: gradients are those of `pass`; with `batch` a block's weights are gathered and its gradients reduced
    once a batch, however many microbatches and passes there are; a number does so with fewer of them."""
    world.together("gathers", 2, tmp_path, cases=list(cases_on_ranks(tmp_path, names)), cuts=[17, 7], budget=60)
    every = torch.load(tmp_path / "gathers.pt")
    for name, found in zip(names, every, strict=True):
        each, ends, held, once = (found[gather][0] for gather in GATHERS)
        for gather in GATHERS[1:]:
            close(found[gather][1], found["pass"][1], 1e-5)
        groups, trained, microbatches = (once[name] for name in ("groups", "trained groups", "microbatches"))
        assert groups > 2 and microbatches > 2
        if name == "copies":  # each rank has a whole one, which is reduced once a batch either way
            assert all((way["gather"], way["reduce"]) == (0, trained) for way in (each, ends, held, once))
            continue
        limit = 2 * (name == "first pass")  # two all-gathers of numbers
        assert (once["gather"] - limit, once["reduce"]) == (groups, trained), name
        assert each["reduce"] == trained * microbatches, name
        assert each["gather"] > (1 + name.startswith(("first pass", "adapter's base"))) * (groups - 1) * microbatches, (
            name
        )
        assert ends["reduce"] == held["reduce"] == each["reduce"] - ends["trained ends"] * (microbatches - 1), name
        assert each["gather"] - ends["gather"] >= microbatches - 1, name
        assert ends["gather"] - held["gather"] >= 2 * microbatches - 1, "a block's, for passes in both directions"


@pytest.mark.xdist_group("ranks")
def test_ranks_decide_alike(tmp_path: Path, mesh) -> None:
    """All take what every rank has room for."""
    tiny_model(tmp_path / "model")
    world.together("decisions", 2, tmp_path)
    written = [[gather] * 2 for gather in (*GATHERS, 100)]
    assert torch.load(tmp_path / "decisions.pt") == [["batch"] * 2, ["pass"] * 2, *written]
