"""The loop of supervised fine-tuning: train, measure the held-out loss, keep checkpoints."""

from collections.abc import Sequence

from buffer.wire.protocol import EvaluationResult
from learner.checkpoint import Checkpoints
from learner.drain import Stopping
from learner.model.policy import Policy
from learner.record.metrics import Metrics
from learner.sft.answer_loss import AnswerSteps, HeldOut
from learner.train import collectives


def run(
    policy: Policy,
    steps: AnswerSteps,
    held_out: HeldOut,
    stopping: Stopping,
    checkpoints: Checkpoints,
    metrics: Metrics,
    versions: int,
) -> None:
    """Train from the last checkpoint to `versions`."""
    version = checkpoints.restore(policy)
    if not collectives.broadcast_from_rank0(version in metrics.evaluations(version)):
        metrics.log_evaluations(version, held_out.measure(policy, version))
    while version < versions and not stopping.agreed():
        with metrics.span("train"):
            stats = steps.step(policy, version)
        version += 1
        with metrics.span("evaluate"):
            measured = held_out.measure(policy, version)
        metrics.log(version, stats)  # before the checkpoint: a restored version must have its record
        metrics.log_evaluations(version, measured)
        with metrics.span("checkpoint"):
            checkpoints.save(policy, version, rating(measured))
    checkpoints.finish(policy, version)


def rating(measured: Sequence[EvaluationResult]) -> float | None:
    """For `learner.keep_best`: the mean held-out loss, negative."""
    losses = [figures["loss"] for result in measured for figures in result.figures.values()]
    return -sum(losses) / len(losses) if losses else None
