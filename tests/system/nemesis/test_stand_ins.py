"""What the stand-ins of learner and server write down: damaged weights, samples and checkpoints get other names."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from buffer.wire.message import Array
from buffer.wire.protocol import Part, SampleRows
from tests.system.nemesis.history import INITIAL, History, digest, following
from tests.system.nemesis.learner import SHARD, Checkpoints, groups_of, named, shard_of
from tests.system.nemesis.peers import rude_sample
from tests.system.nemesis.run import NemesisRun
from tests.system.nemesis.server import through_proxy
from tests.system.nemesis.weights import SPECS, NamedPolicy, policy_of, weights_of

POLICY = following(INITIAL, [(0, ["a", "b"])])


def test_a_policy_is_read_from_its_weights() -> None:
    weights = {name: tensor.clone() for name, tensor in NamedPolicy(POLICY).full_weights()}
    assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()] == [*map(tuple, SPECS)]
    assert policy_of(weights) == POLICY


@pytest.mark.parametrize("name", [spec.name for spec in SPECS])
def test_a_tensor_of_another_version_or_with_a_flipped_bit_is_found(name: str) -> None:
    mixed, damaged, missing = dict(weights_of(POLICY)), dict(weights_of(POLICY)), dict(weights_of(POLICY))
    mixed[name] = dict(weights_of(INITIAL))[name]
    damaged[name] = damaged[name].clone()
    damaged[name].view(-1).numpy().view(np.uint8)[-1] ^= 1
    del missing[name]
    assert all(policy_of(weights) != POLICY for weights in (mixed, damaged, missing))


def part(samples: list[bytes], items: list[int]) -> Part:
    """A batch of these samples."""
    count = len(samples)
    column = Array.of(np.zeros(count, np.int64))
    columns = {"item": Array.of(np.array(items)), "reward": Array.of(np.zeros(count)), "metrics": {}}
    columns |= {name: column for name in ("dispatched", "tokens", "sampled")}
    rows = SampleRows(**columns, truncated=Array.of(np.zeros(count, np.uint8)))
    return Part(version=0, rank=0, world=1, rows=rows, positions=Array.of(np.arange(count)), samples=samples)


def test_groups_are_named_by_their_bytes_and_damaged_ones_by_others() -> None:
    one, other = rude_sample(3).pack(), rude_sample(4).pack()
    assert groups_of(part([one, other, other], [7, 7, 2])) == [(2, [digest(other)]), (7, [digest(one), digest(other)])]
    for position in range(len(one)):
        damaged = bytearray(one)
        damaged[position] ^= 1
        assert groups_of(part([bytes(damaged)], [7])) != [(7, [digest(one)])], position


def test_a_damaged_shard_is_another_policy(tmp_path: Path) -> None:
    history = History(tmp_path / "history", "learner")
    checkpoints, policy = Checkpoints(tmp_path / "checkpoints", 3, history), NamedPolicy(POLICY)
    assert [checkpoints.save(policy, version) for version in range(1, 10)] == [0, 0, 3, 3, 3, 3, 3, 3, 6]
    assert checkpoints.restore(found := NamedPolicy("")) == 9 and found.state == POLICY
    shard = tmp_path / "checkpoints" / "v000009" / SHARD
    whole = shard.read_bytes()
    assert named(shard) == POLICY and whole == shard_of(POLICY)
    for position in (0, 31, 32, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        shard.write_bytes(damaged)
        assert named(shard) not in (POLICY, INITIAL) and len(named(shard)) == 64


def test_each_learner_is_at_an_address_of_its_own_at_the_proxy() -> None:
    known: list[str | None] = []

    async def where(before: str | None) -> str:
        known.append(before)
        return f"tcp://127.0.0.1:{40_000 + len(known)}"

    async def follow() -> list[str]:
        proxied, address = through_proxy(where, 5), None
        return [address := await proxied(address) for _ in range(2)]

    assert asyncio.run(follow()) == ["tcp://127.1.156.65:5", "tcp://127.1.156.66:5"]
    assert known == [None, "tcp://127.0.0.1:40001"]


def test_a_run_file_is_accepted(tmp_path: Path) -> None:
    run = NemesisRun.make(tmp_path / "outer", seed=3)
    run.path.mkdir()
    run.file.write_text(run.first_file.read_text())
    config = run.config()
    assert config.run.path == run.path and config.run.seed == 3
    assert len({run.port_of(name, "buffer") for name in ("learner", "rollout-0", "rollout-1")}) == 3
