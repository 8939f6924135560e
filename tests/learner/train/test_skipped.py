"""Steps that change nothing are counted and logged with their cause; a run with only such steps fails with a
message."""

import logging
from pathlib import Path

import pytest
import torch

from buffer.wire.protocol import Part
from configs.schema import AlgorithmConfig
from learner.train.batch import Batch
from learner.train.skipped import MOST_SKIPPED, TAUGHT, UNFIT_ADVANTAGES, SkippedSteps, StepsSkipped
from tests.harness import world
from tests.harness.world import Entry, algorithm_of, cut, make_samples, policy_of, scaled, tiny_model

MEAN = AlgorithmConfig(advantage="group_mean")
FINE = {"gradient/skipped": 0.0, "gradient/zero": 0.0, "gradient/overflowed": 0.0, "loss": 0.1}
SKIPPED, ZERO = FINE | {"gradient/skipped": 1.0}, FINE | {"gradient/zero": 1.0}
TEACHES = {UNFIT_ADVANTAGES: 0.0, TAUGHT: 3.0}


def whole(entries: list[Entry]) -> Part:
    return cut(entries, 3, [len(entries)], 0)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "learner.train.skipped"]


@pytest.mark.parametrize("scale", [1e41, -1e41, 1e300])
def test_rewards_beyond_float32(tmp_path: Path, mesh, caplog, scale: float) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    step, before = algorithm_of(policy, 64, MEAN), world.weights(policy)
    figures = step.step(policy, whole(scaled(make_samples(), scale)))
    assert figures["gradient/skipped"] == 1 and figures["gradient/zero"] == 0 and "gradient/norm" not in figures
    assert all(torch.equal(before[name], tensor) for name, tensor in world.weights(policy).items())
    (line,) = lines(caplog)
    assert line.startswith("version 4: the step was skipped, the weights stay as they are: advantages exceed float32")
    assert f"{abs(scale):.3g}" in line and "\n" not in line and len(line) < 300
    assert step.step(policy, whole(make_samples()))["gradient/skipped"] == 0 and step.skipped.in_row == 0


@pytest.mark.parametrize(("loss", "cause"), [("ppo", "no advantage differs from zero"), ("gspo", "no advantage")])
def test_a_batch_without_variance(tmp_path: Path, mesh, caplog, loss: str, cause: str) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    figures = algorithm_of(policy, 64, AlgorithmConfig(loss=loss)).step(policy, whole(scaled(make_samples(), 0.0)))
    assert (figures["gradient/skipped"], figures["gradient/zero"], figures["gradient/norm"]) == (0, 1, 0)
    (line,) = lines(caplog)
    assert line.startswith(f"version 4: the gradient is zero, the first one: {cause}")


def test_a_norm_that_overflows_though_its_parts_are_finite(tmp_path: Path, mesh) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    step = algorithm_of(policy, 64)
    for value, overflowed in ((1e30, 1.0), (torch.inf, 0.0), (torch.nan, 0.0)):
        step.backward(policy, Batch.from_part(whole(make_samples()), 64))
        next(policy.parameters()).grad.to_local().fill_(value)
        figures = step.optimizer.update(3)
        assert (figures["gradient/skipped"], figures["gradient/overflowed"]) == (1.0, overflowed), value


@pytest.mark.parametrize(("value", "skipped", "zero"), [(0.25, 0, 0), (0.0, 0, 1), (torch.inf, 1, 0)])
def test_a_version_that_is_held_changes_no_weight(tmp_path: Path, mesh, value: float, skipped: int, zero: int) -> None:
    """Its metrics describe the gradient as the metrics of a step do."""
    policy = policy_of(tiny_model(tmp_path), mesh)
    optimizer, before = algorithm_of(policy, 64).optimizer, world.weights(policy)
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, value)
    norm = value * sum(parameter.numel() for parameter in policy.parameters()) ** 0.5
    metrics = {"lr": 0, "gradient/skipped": skipped, "gradient/overflowed": 0, "gradient/zero": zero}
    assert optimizer.hold() == pytest.approx(metrics | ({} if skipped else {"gradient/norm": norm}))
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in world.weights(policy).items())


@pytest.mark.parametrize(
    ("metrics", "sums", "cause"),
    [
        (SKIPPED, TEACHES | {UNFIT_ADVANTAGES: 1.0}, "advantages exceed float32, with rewards from -2 to 1e+41"),
        (SKIPPED | {"loss": float("nan")}, TEACHES, "the loss is nan"),
        (SKIPPED | {"loss": -float("inf")}, TEACHES, "the loss is -inf"),
        (SKIPPED | {"gradient/overflowed": 1.0}, TEACHES, "the norm of the gradient exceeds float32, but"),
        (SKIPPED, TEACHES, "a part of the gradient is not finite"),
        (ZERO, TEACHES, "the loss masks every token"),
        (ZERO, TEACHES | {TAUGHT: 0.0}, "no advantage differs from zero"),
    ],
)
def test_each_cause_is_named(mesh, caplog, metrics, sums, cause: str) -> None:
    SkippedSteps().note(7, (-2.0, 1e41), metrics, sums)
    (line,) = lines(caplog)
    assert line.startswith("version 7: ") and cause in line and "; " in line


@pytest.mark.parametrize(
    ("metrics", "cause"), [(SKIPPED, "a part of the gradient is not finite"), (ZERO, "the model gives every trained")]
)
def test_each_cause_of_a_step_on_demonstrations_is_named(mesh, caplog, metrics, cause: str) -> None:
    SkippedSteps().note_supervised(7, metrics)
    (line,) = lines(caplog)
    assert line.startswith("version 7: ") and cause in line and "; " in line


def test_a_step_with_a_gradient_is_not_logged_and_ends_a_row_without(mesh, caplog) -> None:
    steps = SkippedSteps()
    for version, metrics in enumerate((FINE, ZERO, ZERO, FINE, ZERO), 1):
        steps.note(version, (0.0, 1.0), metrics, TEACHES)
    counted = [line.partition(": the gradient is zero, ")[::2] for line in lines(caplog)]
    assert [(version, many.partition(":")[0]) for version, many in counted] == [
        ("version 2", "the first one"),
        ("version 3", "2 in a row"),
        ("version 5", "the first one"),
    ]


def test_a_long_row_without_gradient_is_logged_ever_more_rarely(mesh, caplog) -> None:
    steps = SkippedSteps()
    for version in range(1, 101):
        steps.note(version, (0.0, 0.0), ZERO, TEACHES)
    assert [line.partition(":")[0] for line in lines(caplog)] == [f"version {2**n}" for n in range(7)]
    steps.check()
    steps.check_end()  # zero gradients are not a failure


@pytest.mark.parametrize(
    ("steps", "given_up", "without_result"),
    [
        ([SKIPPED] * (MOST_SKIPPED - 1), False, True),
        ([FINE] + [SKIPPED] * (MOST_SKIPPED - 1), False, False),
        ([FINE] + [SKIPPED] * MOST_SKIPPED, True, True),
        ([SKIPPED] * MOST_SKIPPED + [FINE], False, False),
        ([SKIPPED] * MOST_SKIPPED + [ZERO], False, False),
        ([SKIPPED, FINE] * MOST_SKIPPED, False, False),
        ([SKIPPED], False, True),
        ([FINE], False, False),
        ([], False, False),
    ],
)
def test_when_a_run_ends(mesh, steps, given_up: bool, without_result: bool) -> None:
    """A run is given up after MOST_SKIPPED in a row; it has no result if its last ones, or all, were skipped."""
    logging.disable(logging.WARNING)
    skipped = SkippedSteps()
    for version, metrics in enumerate(steps, 1):
        skipped.note(version, (0.0, 1.0), metrics, TEACHES)
    logging.disable(logging.NOTSET)
    for check, expected in ((skipped.check, given_up), (skipped.check_end, without_result)):
        if expected:
            with pytest.raises(
                StepsSkipped, match=r"^the run .* at version \d+.*: the last .* skipped, lately because"
            ):
                check()
        else:
            check()


def test_steps_of_an_earlier_process_count_as_done(mesh) -> None:
    """A learner that resumed at version 90 and skipped its last two steps still has a result."""
    skipped = SkippedSteps()
    for version in (91, 92):
        skipped.note(version, (0.0, 1.0), SKIPPED, TEACHES)
    skipped.check_end()
