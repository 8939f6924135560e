"""`python -m tests.system.failures.stand_ins rollout|learner CONFIG`: the two processes without GPU and weights.

The parts are those of the chaos test: a learner that trains a digest in the real loop, a rollout server with the real
loops, episodes, reward workers and connection. Unlike there, the run file names task and reward.
"""

import asyncio
import sys
from functools import partial
from pathlib import Path

import uvloop

from buffer.wire.client import Connection, LearnerClient, RolloutClient, heartbeats
from configs.entrypoint import BAD_INPUT, DONE, ENDINGS, FAILED, configure_logging
from configs.load import load
from configs.resume import fingerprint
from configs.schema import Config
from tests.system.chaos_run import Run


def learn(config: Config) -> int:
    """Train to `run.versions` or to the end of the run; the exit code is that of `python -m learner`."""
    from tests.system.chaos_learner import Checkpoints, Journal, Metrics, Policy, Weights, real_loop

    run = Run(config.run.folder)
    run.checkpoints.mkdir(exist_ok=True)
    weights, checkpoints = Weights(), Checkpoints(run.checkpoints, config.learner.checkpoint_every)
    told = config.buffer.address, "learner-0", fingerprint(config), 0, 1
    with LearnerClient(*told, serves=weights.address) as batches:
        real_loop()(Policy(), Journal(run.journal), batches, weights, checkpoints, Metrics(), config.run.versions)
    if batches.finished is None:
        return DONE
    print(f"python -m learner: {batches.finished.why}", file=sys.stderr)
    return ENDINGS[batches.finished.outcome]


async def roll_out(config: Config) -> int:
    """Make groups until the buffer has no more work."""
    from rollout.cage.user_task import UserTask
    from rollout.concurrency import start
    from rollout.episodes.episode import Failure
    from rollout.episodes.setup import RolloutSetup
    from rollout.loop import roll
    from rollout.rewards.workers import RewardPool
    from rollout.tasks import TASKS
    from tests.system.chaos_rollout import Engine, Prompts, following

    engine, prompts, log = Engine(Run(config.run.folder)), Prompts(), config.run.path / "logs" / "rollout-0"
    client = Connection(config.buffer.address, "rollout-0", "rollout", fingerprint(config))
    task = TASKS.get(config.rollout.task) or UserTask(config, None, log)
    setup = RolloutSetup(prompts, task, RewardPool(config.reward, log))  # type: ignore[arg-type]
    async with setup, client:
        buffer = RolloutClient(client, lambda: engine.version)
        episodes = setup.episodes(config, engine, 1.0, config.batch.samples)  # type: ignore[arg-type]
        revoke = partial(episodes.abandon, failure=Failure("the buffer took the lease back"))
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(following(config, buffer, engine)),
                tasks.create_task(heartbeats(buffer, config.rollout.heartbeat_s, episodes.stages.stats, revoke)),
            ]
            await engine.first.wait()
            await roll(buffer.ask, buffer, episodes, start(config, True, lambda tokens: 64)[0])
            for other in others:
                other.cancel()
    return DONE


if __name__ == "__main__":
    configure_logging()
    role, settings = sys.argv[1], load([str(Path(sys.argv[2]))])
    try:
        code = learn(settings) if role == "learner" else uvloop.run(roll_out(settings))
    except KeyboardInterrupt:
        code = FAILED
    except ValueError as error:
        print(f"python -m {role}: {error}", file=sys.stderr)
        code = BAD_INPUT
    sys.exit(code)
