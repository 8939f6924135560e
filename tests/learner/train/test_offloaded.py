"""`learner.cpu_offload: optimizer` trains as without it, bit for bit, and its checkpoints are those of any learner."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.checks import check
from configs.load import ConfigError
from configs.schema import Config, ModelConfig
from learner.checkpoint import Checkpoints
from learner.model import memory
from learner.model.master_weights import ALIGNED, PORTION, SLOTS, MasterWeights, host_memory, spans_of, unlock
from learner.train.offloaded_adam import OffloadedAdamW
from tests.harness import world
from tests.harness.expert_batches import expert_model
from tests.harness.offloaded import START, learner_of, parts_of, rows, step
from tests.harness.pictured import seeing_model
from tests.harness.world import alone, tiny_model

VERSIONS = range(START, START + 3)
WAYS = (
    ("none", False, {}),
    ("optimizer", "optimizer", {}),
    *((f"{gather}", "optimizer", {"gather": gather}) for gather in (0, 1, "batch")),
)


@dataclass
class Trained:
    figures: list[Any]
    rows: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    rounded: bool
    """Whether each parameter is its master weight in the parameter's dtype."""


def trained(model: ModelConfig, mesh: Any, offload: Any, **keys: Any) -> Trained:
    policy, algorithm = parts_of(model, mesh, learner_of(offload, **keys))
    figures = step(policy, algorithm, VERSIONS, [24])
    rounded = policy.masters is None or all(
        p.dtype == policy.dtype and torch.equal(p.to_local(), rows.to(p.dtype))
        for p, rows in zip(policy.masters.parameters, policy.masters.views(policy.masters.values), strict=True)
    )
    return Trained(figures, rows(policy, algorithm), world.weights(policy), rounded)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """A model in bfloat16, several microbatches a version, trained in each way."""
    model = tiny_model(tmp_path_factory.mktemp("model"), tied=True, dtype=torch.bfloat16)
    with alone() as mesh:
        return {name: trained(model, mesh, offload, **keys) for name, offload, keys in WAYS}


def same(one: Trained, other: Trained) -> None:
    assert one.figures == other.figures and other.rounded
    assert one.rows.keys() == other.rows.keys()
    assert all(torch.equal(one.rows[name], other.rows[name]) for name in one.rows)
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def test_weights_and_moments_are_those_of_a_learner_that_does_not_offload(runs: dict[str, Trained]) -> None:
    same(runs["none"], runs["optimizer"])
    before = min(figures["gradient/norm"] for figures in runs["none"].figures)
    assert before > 0, "something was trained"


@pytest.mark.parametrize("gather", ["0", "1", "batch"])
def test_gradients_that_are_reduced_once_a_batch_are_as_wide(runs: dict[str, Trained], gather: str) -> None:
    """Else they would be rounded to bfloat16, 0.4 % each."""
    for name, one in runs["none"].rows.items():
        torch.testing.assert_close(runs[gather].rows[name], one, rtol=2e-3, atol=1e-6)
    assert runs[gather].rounded


@pytest.mark.long
@pytest.mark.parametrize("kind", ["float32", "experts", "tower", "frozen tower"])
def test_other_models_are_trained_alike(tmp_path: Path, mesh: Any, kind: str) -> None:
    if kind == "float32":
        model = tiny_model(tmp_path)
    elif kind == "experts":
        model = expert_model(tmp_path).model_copy(update={"dtype": "bfloat16"})
    else:
        freeze = ["vision"] if kind.startswith("frozen") else []
        model = seeing_model(tmp_path, "qwen3_vl").model_copy(update={"dtype": "bfloat16", "freeze": freeze})
    same(*(trained(model, mesh, offload) for offload in (False, "optimizer")))


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("ranks", "on", "kind"), [(2, 2, "text"), (3, 3, "experts"), (4, 2, "text")])
def test_ranks_that_offload_are_equal_to_ranks_that_do_not(tmp_path: Path, ranks: int, on: int, kind: str) -> None:
    """Rows are uneven on three ranks; (4, 2): two copies of the model."""
    made = tiny_model(tmp_path / "model", dtype=torch.bfloat16) if kind == "text" else expert_model(tmp_path / "model")
    model = made.model_copy(update={"dtype": "bfloat16"}).model_dump(mode="json")
    world.together("offloaded", ranks, tmp_path, model=model, on=on, cuts=[24 // ranks] * ranks)
    (plain, weights, _), (figures, others, alike) = torch.load(tmp_path / "offloaded.pt")
    assert all(alike) and plain == figures
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize(("was", "now"), [("optimizer", "optimizer"), (False, "optimizer"), ("optimizer", False)])
def test_a_checkpoint_is_restored_whoever_offloads(
    tmp_path: Path, runs: dict[str, Trained], mesh: Any, was: Any, now: Any
) -> None:
    model = tiny_model(tmp_path / "model", tied=True, dtype=torch.bfloat16)
    for offload, versions in ((was, VERSIONS[:2]), (now, VERSIONS[2:])):
        learner = learner_of(offload, checkpoint_every=1)
        policy, algorithm = parts_of(model, mesh, learner)
        checkpoints = Checkpoints(tmp_path / "checkpoints", model, learner, algorithm.optimizer, versions=100)
        assert checkpoints.restore(policy) == (0 if versions.start == START else versions.start)
        figures = step(policy, algorithm, versions, [24])
        checkpoints.save(policy, versions.stop)
        checkpoints.close()
    assert figures == runs["none"].figures[2:]
    found = rows(policy, algorithm)
    assert all(torch.equal(runs["none"].rows[name], found[name]) for name in found)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.sampled_from([ALIGNED, 128, 1 << 20]))
def test_each_number_lies_in_one_place_of_one_portion(sizes: list[int], portion: int) -> None:
    taken: set[tuple[int, int]] = set()
    numbers = []
    for index, spans in enumerate(spans_of(sizes, portion)):
        for number, start, size, offset in spans:
            places = {(index, at) for at in range(offset, offset + size)}
            assert offset + size <= portion and not places & taken and not (offset - start) % ALIGNED
            taken |= places
            numbers += [(number, at) for at in range(start, start + size)]
    assert numbers == [(number, at) for number, size in enumerate(sizes) for at in range(size)]


def test_parameters_over_several_portions_are_updated_whole() -> None:
    """To the last bit but for numbers at the ends of vectors, for which the processor has other instructions."""
    torch.manual_seed(0)
    plain, model = (torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 40)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    masters = MasterWeights(model, torch.device("cpu"), portion=512)
    for name, parameter in model.named_parameters():
        masters.keep(name, parameter.detach())
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    found = OffloadedAdamW(masters, lr=1e-2)
    for _ in range(3):
        for module, optimizer in ((plain, expected), (model, found)):
            torch.manual_seed(1)
            module(torch.randn(4, 40)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(masters.spans) == 5
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_memory_on_the_gpu_and_in_the_host(tmp_path: Path, mesh: Any) -> None:
    """The estimate against what a policy holds."""
    model = tiny_model(tmp_path, dtype=torch.bfloat16)
    policy, _ = parts_of(model, mesh, learner_of("optimizer"))
    kept, apart = (memory.estimate(model, learner_of(offload), 1) for offload in (False, "optimizer"))
    assert apart.candidates[0].fixed["weights"] == sum(p.to_local().nbytes for p in policy.model.parameters())
    assert apart.candidates[0].fixed["optimizer"] == 0
    passes, step = apart.candidates[:-1], apart.candidates[-1]
    assert max(one.total(256) for one in passes) < kept.total(256)
    assert step.fixed["optimizer's portions"] == SLOTS * memory.host_state_bytes(model, learner_of("optimizer"), 1)
    assert policy.masters is not None
    padding = 4 * ALIGNED * len(policy.masters.parameters)
    needed = memory.host_state_bytes(model, learner_of("optimizer"), 1)
    assert needed <= 3 * policy.masters.values.nbytes <= needed + 3 * padding


def test_a_machine_with_too_little_memory_is_refused(tmp_path: Path) -> None:
    given = {"model": tiny_model(tmp_path), "data": {"train": "x"}, "reward": {"function": "x"}}

    def run(**learner: Any) -> Config:
        return Config.model_validate(given | {"learner": {"ranks": 3, **learner}})

    state = 3 * memory.host_state_bytes(given["model"], run(cpu_offload="optimizer").learner, 3)
    memory.check_host(run(cpu_offload="optimizer"), 8192, 3, state, 3)
    memory.check_host(run(), 8192, 3, 0, 3)
    for offload, named in (("optimizer", "optimizer"), (True, "true")):
        with pytest.raises(
            ConfigError, match=rf"^learner\.cpu_offload: {named}: 3 ranks would keep .* GiB in host mem"
        ):
            memory.check_host(run(cpu_offload=offload), 8192, 3, state - 1, 3)
    both = run(cpu_offload="optimizer", activation_checkpointing="offload")
    with pytest.raises(ConfigError, match=r"^learner\.activation_checkpointing: offload: 3 ranks .* GiB of inputs"):
        memory.check_host(both, 8192, 3, state, 3)


def test_an_adapter_offloads_nothing(tmp_path: Path) -> None:
    given = {"model": {"path": str(tmp_path), "lora": {"rank": 4}}, "data": {"train": "x"}}
    config = Config.model_validate(given | {"reward": {"function": "x"}, "learner": {"cpu_offload": "optimizer"}})
    with pytest.raises(ConfigError, match=r"learner\.cpu_offload: optimizer with model\.lora: .*; set it to false"):
        check(config, files=())


def test_host_memory_is_locked_as_one_piece_and_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses a copy that crosses from one locked piece into the next, as rows of large parameters did."""
    locked: dict[int, int] = {}
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, size, _: locked.update({address: size}),
        cudaHostUnregister=lambda address: locked.pop(address) and None,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    held = host_memory(PORTION + ALIGNED, torch.device("cuda"))
    assert locked == {held.data_ptr(): held.nbytes}
    unlock(held, torch.device("cuda"))
    assert not locked
