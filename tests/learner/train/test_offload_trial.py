"""The trial of `learner.cpu_offload: optimizer` lets a right step pass and refuses, in one line, whatever differs."""

from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from configs.load import ConfigError
from learner.model.master_weights import MasterWeights
from learner.train.offload_trial import check_offload, try_offload
from learner.train.offloaded_adam import OffloadedAdamW
from tests.harness.world import LEARNER

CPU = torch.device("cpu")
REFUSED = rf"^learner\.cpu_offload: optimizer: with torch {torch.__version__.replace('+', '[+]')} "


class SkipsLast(OffloadedAdamW):
    """Leaves the last portion as it is, which only many portions have beside others."""

    def _update(self, spans: Any, portion: Any, gradients: Any) -> None:
        if spans != self._masters.spans[-1]:
            super()._update(spans, portion, gradients)


class ForgetsMoments(OffloadedAdamW):
    """Begins each step with moments of zero."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for memory in self.held[1:]:
            memory.zero_()
        super().step(closure)


class ForgetsToClip(OffloadedAdamW):
    """Does not divide gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.grad_scale = None
        super().step(closure)


class NeverSkips(OffloadedAdamW):
    """Applies gradients that are not finite."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.found_inf = None
        super().step(closure)


class NotesPlacements(OffloadedAdamW):
    """Notes how the parameters that it is given lie on the ranks."""

    seen: ClassVar[set[Any]] = set()

    def __init__(self, masters: MasterWeights, **options: Any) -> None:
        super().__init__(masters, **options)
        self.seen.update(p.placements if isinstance(p, DTensor) else None for p in masters.parameters)


class NotesDevices(TorchFunctionMode):
    """Notes on which devices random numbers are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.device | None] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is torch.randn:
            self.seen.add(options.get("device"))
        return function(*args, **options)


def test_a_step_that_is_right_passes(mesh: Any) -> None:
    before = torch.random.get_rng_state()
    try_offload(mesh, CPU, width=128)
    assert torch.equal(before, torch.random.get_rng_state()), "the run draws as without the trial"


def test_the_trial_s_weights_are_sharded_as_the_run_s_are(mesh: Any) -> None:
    try_offload(mesh, CPU, NotesPlacements, width=128)
    assert NotesPlacements.seen == {(Shard(0),)}


def test_weights_and_inputs_are_drawn_on_the_run_s_device(mesh: Any) -> None:
    with NotesDevices() as noted:
        try_offload(mesh, CPU, width=128)
    assert noted.seen == {CPU}


@pytest.mark.parametrize("broken", [SkipsLast, ForgetsMoments, ForgetsToClip, NeverSkips])
def test_a_step_that_differs_is_refused(mesh: Any, broken: type[OffloadedAdamW]) -> None:
    line = REFUSED + r"weights .* by (0\.\d+|[\d.]+) at most; set it to true or false$"
    with pytest.raises(ConfigError, match=line):
        try_offload(mesh, CPU, broken, width=128)


@pytest.mark.parametrize(("owner", "name"), [(FSDPModule, "_get_fsdp_state"), (FSDPState, "_lazy_init")])
def test_a_torch_without_a_private_name_is_refused(
    mesh: Any, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """By the same line, without a traceback."""
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError, match=REFUSED + rf"the trial of a step failed \(Attr.*{name}.*\); set it to true"):
        try_offload(mesh, CPU, width=128)


def test_gradients_that_are_rounded_are_refused(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a torch that reads the dtype of gradients only when it is initialised."""

    def note(group: FSDPParamGroup, dtype: torch.dtype) -> None:
        group.__dict__.setdefault("noted", dtype)

    monkeypatch.setattr(FSDPParamGroup, "_orig_dtype", property(lambda group: group.noted, note), raising=False)
    with pytest.raises(ConfigError, match=REFUSED):
        try_offload(mesh, CPU, width=128)


def test_the_trial_is_for_an_offloaded_optimizer_on_a_gpu(mesh: Any) -> None:
    for offload, device in ((False, torch.device("cuda")), (True, torch.device("cuda")), ("optimizer", CPU)):
        check_offload(LEARNER.model_copy(update={"cpu_offload": offload}), mesh, device)
