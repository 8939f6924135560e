"""`python -m tests.system.failures.stand_ins rollout|learner|reward CONFIG`: processes without GPU and weights.

The parts are those of the chaos test: a learner that trains a digest in the real loop, a rollout server with the real
loops, episodes, reward workers, connection and evaluator. Unlike there, the run file has a task, a reward and
evaluation sets. A reward server scores an answer by its checksum (`liking`), and does not start while the folder of the
runs has a file `gate-reward`.
"""

import asyncio
import json
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from buffer.curve import client_keys_for
from buffer.wire.client import Connection, LearnerClient, RolloutClient, heartbeats
from buffer.wire.protocol import EvaluationResult
from configs.entrypoint import BAD_INPUT, DONE, ENDINGS, FAILED, configure_logging, made_progress
from configs.inner_command import inner_words
from configs.load import load
from configs.resume import fingerprint
from configs.schema import Config
from tests.system.chaos_run import Run


class EvaluationLog:
    """Stand-in for `learner.record.metrics.Metrics`: one line for each evaluation, none after a restored version."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def log(self, version: int, stats: object) -> None:
        pass

    def evaluations(self, version: int) -> list[int]:
        kept = [record for record in self.records() if record["recorded"] <= version]
        self.path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        return [record["due"] for record in kept]

    def log_evaluations(self, version: int, results: Sequence[EvaluationResult]) -> None:
        with self.path.open("a") as file:
            for result in results:
                file.write(json.dumps({"recorded": version, **result.model_dump(mode="json")}) + "\n")


def learn(config: Config) -> int:
    """Train to `run.versions` or to the end of the run; the exit code is that of `python -m learner`."""
    from tests.system.chaos_learner import Checkpoints, Journal, Policy, Unstoppable, Weights, real_loop

    run = Run(config.run.folder)
    run.checkpoints.mkdir(exist_ok=True)
    weights, checkpoints = Weights(), Checkpoints(run.checkpoints, config.learner.checkpoint_every)
    told = config.buffer.address, "learner-0", fingerprint(config), 0, 1
    keys = client_keys_for(config.buffer.address, config.run.path, "learner")
    with LearnerClient(*told, serves=weights.address, keys=keys) as batches:
        metrics = EvaluationLog(run.folder / "evaluations.jsonl")
        parts = Policy(), Journal(run.journal), batches, Unstoppable(), weights, checkpoints, metrics
        real_loop()(*parts, config.run.versions)
    if batches.finished is None:
        return DONE
    print(f"python -m learner: {batches.finished.why}", file=sys.stderr)
    return ENDINGS[batches.finished.outcome]


async def roll_out(config: Config) -> int:
    """Make groups until the buffer has no more work."""
    from rollout.cage.user_task import UserTask
    from rollout.concurrency import SparePlaces, start
    from rollout.episodes.episode import Failure
    from rollout.episodes.setup import RolloutSetup
    from rollout.evaluation.evaluator import Evaluator
    from rollout.evaluation.players import load_sets
    from rollout.loop import PolicyUpdates, follow, roll, until_last
    from rollout.rewards.workers import RewardPool
    from rollout.tasks import TASKS
    from tests.system.chaos_rollout import Engine, Prompts, Receiver

    engine, prompts, log = Engine(Run(config.run.folder)), Prompts(), config.run.path / "logs" / "rollout-0"
    keys = client_keys_for(config.buffer.address, config.run.path, "rollout")
    client = Connection(config.buffer.address, "rollout-0", "rollout", fingerprint(config), keys=keys)
    task = TASKS.get(config.rollout.task) or UserTask(config, None, log)
    setup = RolloutSetup(prompts, task, RewardPool(config.reward, log))  # type: ignore[arg-type]
    sets, places = load_sets(config) if config.eval.every else [], start(config, True, lambda tokens: 64)[0]
    async with setup, client:
        buffer = RolloutClient(client, lambda: engine.version)
        episodes = setup.episodes(config, engine, 1.0, config.batch.samples)  # type: ignore[arg-type]
        receiver = Receiver(buffer, engine)
        updates = PolicyUpdates(receiver, config.run.versions, buffer.nudged.set)  # type: ignore[arg-type]
        spare = SparePlaces(places, config.eval.share)
        evaluator = Evaluator(config, setup, engine, buffer, receiver, spare, sets)  # type: ignore[arg-type]
        revoke = partial(episodes.abandon, failure=Failure("the buffer took the lease back"))
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(follow(updates, engine, evaluator)),  # type: ignore[arg-type]
                tasks.create_task(evaluator.take_over()),
                tasks.create_task(heartbeats(buffer, config.rollout.heartbeat_s, episodes.stages.stats, revoke)),
            ]
            await engine.first.wait()
            await roll(buffer.ask, buffer, episodes, places)
            if sets and buffer.finished and buffer.finished.last:
                updates.expect(buffer.finished.last)
                await until_last(updates, evaluator, config.learner.timeout_s)
            for other in others:
                other.cancel()
    return DONE


def liking(answer: str) -> float:
    """Return the reward of a reward server for an answer."""
    return (1 + zlib.crc32(answer.encode()) % 1000) / 1000


async def serve_rewards(config: Config) -> int:
    """Answer until it is killed or drained."""
    from aiohttp import web

    while (Path(config.run.folder) / "gate-reward").exists():
        time.sleep(0.01)

    async def classify(request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        made_progress()
        return web.json_response({"data": [{"index": n, "probs": [liking(text)]} for n, text in enumerate(texts)]})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/health", health), web.post("/classify", classify)])
    await web._run_app(app, host="127.0.0.1", port=config.reward.port, print=None)
    return DONE


if __name__ == "__main__":
    inner_words("rollout|learner|reward", "CONFIG")
    configure_logging()
    role, settings = sys.argv[1], load([str(Path(sys.argv[2]))])
    try:
        served = {"rollout": roll_out, "reward": serve_rewards}
        code = learn(settings) if role == "learner" else uvloop.run(served[role](settings))
    except KeyboardInterrupt:
        code = FAILED
    except ValueError as error:
        print(f"python -m {role}: {error}", file=sys.stderr)
        code = BAD_INPUT
    sys.exit(code)
