"""`python -m tests.system.nemesis.learner OUTER`: a learner. Real are its loop, both wires, and what a checkpoint is.

It trains a chain of digests (`history.following`) and writes down what it trained before anybody learns of it. Its
checkpoints are sealed and found by `learner/saved/manifest.py`. A checkpoint that the disk does not take is left out,
as the real learner does.
"""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from buffer.wire.client import LearnerClient, RefusedError
from buffer.wire.protocol import Part
from buffer.wire.sample import Sample
from configs.checkpoint_files import complete, damage, folder_of, newest
from configs.entrypoint import BAD_INPUT, configure_logging
from configs.inner_command import inner_words
from configs.load import ConfigError
from configs.resume import fingerprint
from learner.saved.manifest import discard, recover, seal, set_aside
from learner.weights.sender.publish import Sender
from tests.system.chaos_learner import Metrics, Unstoppable, placed, real_loop
from tests.system.nemesis.history import INITIAL, History, Restored, Trained, digest, following
from tests.system.nemesis.keys import buffer_keys, learner_keys
from tests.system.nemesis.run import NemesisRun
from tests.system.nemesis.weights import SPECS, NamedPolicy, weights_of

log = logging.getLogger("learner")
KEEP = 2
SHARD = "state/shard.bin"


def groups_of(part: Part) -> list[tuple[int, list[str]]]:
    """Item and digests of each group of a batch. Bytes that are no sample keep a digest of their own."""
    groups: dict[int, list[str]] = {}
    for item, _, data in sorted(placed(part)):
        try:
            whole = Sample.unpack(data).pack()
        except ValueError:
            whole = b"damaged" + data
        groups.setdefault(item, []).append(digest(whole))
    return sorted(groups.items())


@dataclass(frozen=True)
class Algorithm:
    """Stands for `learner.train.step.Algorithm`."""

    history: History

    def warm_up(self, policy: NamedPolicy) -> None:
        pass

    def step(self, policy: NamedPolicy, part: Part) -> dict[str, float]:
        groups = groups_of(part)
        policy.state = following(policy.state, groups)
        self.history.add(Trained, version=part.version, groups=groups, policy=policy.state)
        return {}


@dataclass
class Checkpoints:
    """Stands for `learner.checkpoint.Checkpoints`. A shard is the policy's name and one of its tensors."""

    folder: Path
    every: int
    history: History
    kept: list[int] = field(default_factory=list)

    def restore(self, policy: NamedPolicy) -> int:
        recover(self.folder)
        while (version := newest(self.folder)) and (why := damage(folder_of(self.folder, version))):
            log.error("checkpoint v%06d is damaged and skipped: %s", version, why)
            set_aside(folder_of(self.folder, version))
        policy.state = named(folder_of(self.folder, version) / SHARD) if version else INITIAL
        self.kept = complete(self.folder)
        self.history.add(Restored, version=version, policy=policy.state)
        return version

    def save(self, policy: NamedPolicy, version: int, reward: float | None = None) -> int:
        if version % self.every == 0:
            self.finish(policy, version)
        return min(self.kept[-KEEP:], default=0)

    def finish(self, policy: NamedPolicy, version: int) -> None:
        partial = folder_of(self.folder, version).with_suffix(".tmp")
        try:
            self.folder.mkdir(exist_ok=True)
            recover(self.folder)
            (partial / SHARD).parent.mkdir(parents=True)
            (partial / SHARD).write_bytes(shard_of(policy.state))
            seal(partial)
            self.kept = complete(self.folder)
            for old in self.kept[:-KEEP]:
                discard(folder_of(self.folder, old))
        except OSError as error:
            log.warning("checkpoint v%06d failed: %s; training goes on, older ones are kept", version, error)


def shard_of(policy: str) -> bytes:
    """What a checkpoint of `policy` holds."""
    return bytes.fromhex(policy) + dict(weights_of(policy))["embed"].numpy().tobytes()


def named(shard: Path) -> str:
    """The policy of a shard; that of damaged bytes is another one."""
    data = shard.read_bytes()
    policy = data[:32].hex()
    return policy if data == shard_of(policy) else following(policy, [(0, [digest(data)])])


def main(run: NemesisRun) -> None:
    """Train until it is stopped."""
    torch.set_num_threads(1)
    config, history = run.config(), run.history("learner")
    options = {"keys": learner_keys(config), "heartbeat_s": 0.5}
    sender = Sender(SPECS, config.weights, config.run.seed, torch.device("cpu"), **options)  # type: ignore[arg-type]
    run.weights_wire.write_text(sender.address)
    address = f"tcp://127.0.0.1:{run.port_of('learner', 'buffer')}"
    keys = buffer_keys(config, "learner")
    checkpoints = Checkpoints(run.checkpoints, config.learner.checkpoint_every, history)
    with LearnerClient(address, "learner-0", fingerprint(config), 0, 1, sender.address, keys=keys) as batches:
        policy, algorithm = NamedPolicy(INITIAL), Algorithm(history)
        parts = policy, algorithm, batches, Unstoppable(), sender, checkpoints, Metrics()
        real_loop()(*parts, config.run.versions)


if __name__ == "__main__":
    inner_words("OUTER")
    configure_logging()
    try:
        main(NemesisRun(Path(sys.argv[1])))
    except (ConfigError, RefusedError) as refused:
        print(f"python -m learner: {refused}", file=sys.stderr)
        sys.exit(BAD_INPUT)
