"""The learner's loop: take a batch, train on it, publish the policy. Waits for `batches.take`."""

from buffer.wire.client import LearnerClient
from learner.checkpoint import Checkpoints
from learner.drain import Stopping
from learner.model.policy import Policy
from learner.record.metrics import Metrics
from learner.sound import SoundSteps
from learner.weights.sender.publish import Bystander, Follower, Sender
from learner.weights.sender.row_rank import RowRank


def run(
    policy: Policy,
    algorithm: SoundSteps,
    batches: LearnerClient,
    stopping: Stopping,
    weights: Sender | RowRank | Follower | Bystander,
    checkpoints: Checkpoints,
    metrics: Metrics,
    versions: int,
) -> None:
    """Train from the last checkpoint to `versions`. Version v is the policy after v optimizer steps."""
    version = checkpoints.restore(policy)
    batches.rewind(version)
    stopping.agreed()  # else a rank's Take might precede another's Rewind, which undoes the batch
    batches.follow_evaluations(metrics.evaluations(version))
    weights.publish(policy, version)
    algorithm.warm_up(policy)  # meanwhile the servers take the policy
    while version < versions:
        with metrics.span("wait"):
            part = batches.take(version)
        if stopping.agreed() or part is None:
            break
        with metrics.span("train"):
            stats = algorithm.step(policy, part)
        if stats is None:  # the batch is taken again without its bad groups
            continue
        version += 1
        with metrics.span("publish"):
            weights.publish(policy, version)
        with metrics.span("checkpoint"):
            oldest = checkpoints.save(policy, version, stats.get("reward/mean"))
        batches.trained(version - 1, oldest)
        metrics.log(version, stats | weights.stats())
        metrics.log_evaluations(version, batches.evaluations())
    checkpoints.finish(policy, version)
    metrics.log_evaluations(version, batches.last_evaluations())
