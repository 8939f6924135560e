"""A group that would end the learner at each start is named, goes into quarantine, and the learner goes on without it:
with the buffer over real sockets, and with the learner's loop in this process."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from buffer.ledger.training import MOST_ENDS
from buffer.wire.client import LearnerClient
from buffer.wire.message import Array
from buffer.wire.sample import Sample, sample_stats
from buffer.wire.values import Bounds
from learner import loop
from learner.drain import Stopping
from learner.sound import SoundSteps, bounds_of, judged, mismatched, only
from learner.weights.sender.publish import Bystander
from tests.buffer.wire.test_client import threaded
from tests.harness import world
from tests.harness.buffer_process import Buffer, sample
from tests.harness.keys import client_keys
from tests.harness.pictured import form_of, make_pictured, seeing_model
from tests.harness.world import algorithm_of, cut, make_samples, policy_of, tiny_model

BOUNDS = Bounds(vocabulary=64)
POISON = 3
"""Item of the group that cannot be trained: it is in batch 1."""
NUMBERS: dict[str, tuple[str, float]] = {
    "tokens": ("<i4", 1_000_000),
    "behaviour_logprobs": ("<f4", float("nan")),
    "versions": ("<i4", 7),
}


class Killed(Exception):
    """Stands for a signal that ends the process."""


def changed(one: Sample, name: str, value: float | None = None) -> bytes:
    """The sample with another last value in this array."""
    dtype, number = NUMBERS[name]
    fields = one.model_dump()
    array = np.frombuffer(fields[name]["data"], dtype).copy()
    array[-1] = number if value is None else value
    fields[name]["data"] = array.tobytes()
    return bytes(msgpack.packb(fields))


def stored(it: Buffer, items: int, poison: Callable[[Sample], bytes] | None = None) -> None:
    """Groups in the ledger and the store as an earlier release, which judged less, has put them there."""
    handlers = it.requests.handlers
    handlers.ledger.state.ceiling = 1
    for leased in handlers.ledger.ask("rollout-0", 0, items, 0.0):
        group = [sample(float(index), 6, mark=leased.item) for index in range(2)]
        stats = [sample_stats(one.pack()) for one in group]
        assert handlers.ledger.put("rollout-0", leased.item, leased.lease, stats, 0.0) is None
        bad = poison is not None and leased.item == POISON
        packed = [one.pack() for one in group]
        handlers.groups._payloads[leased.item] = [packed[0], poison(group[1])] if bad and poison else packed
    transaction = handlers.changes()
    assert transaction
    handlers.store.commit(transaction)


class Fake:
    """The rest of the loop's parts, and an algorithm that notes the marks of the samples that it trains."""

    def __init__(self, version: int = 0) -> None:
        self.version, self.trained = version, list[list[int]]()

    def restore(self, policy: Any) -> int:
        return self.version

    def save(self, policy: Any, version: int, reward: float | None) -> int:
        self.version = version
        return 0

    def step(self, policy: Any, part: Any) -> dict[str, float]:
        self.trained.append(sorted({int(Sample.unpack(data).tokens.numpy()[-1]) for data in part.samples}))
        return {"gradient/skipped": 0.0, "gradient/overflowed": 0.0}

    def rehearse(self, policy: Any, part: Any) -> bool:
        return True

    def finish(self, policy: Any, version: int) -> None: ...
    def span(self, name: str) -> Any:
        return nullcontext()

    def log(self, version: int, stats: Any) -> None: ...
    def evaluations(self, version: int) -> list[Any]:
        return []

    def log_evaluations(self, version: int, results: Any) -> None: ...


def learn(it: Buffer, parts: Any, versions: int = 3) -> None:
    """One start of a learner, until `versions` or until it is killed."""
    with LearnerClient(it.address, "learner-0", "f" * 16, 0, 1, timeout_s=60, keys=client_keys("learner")) as client:
        client.follow_evaluations = lambda known: None  # type: ignore[method-assign]
        client.last_evaluations = list  # type: ignore[method-assign]
        sound = SoundSteps(parts, client, BOUNDS)
        loop.run(None, sound, client, Stopping(client), Bystander(), parts, parts, versions)  # type: ignore[arg-type]


def quarantined(it: Buffer) -> list[tuple[int, str]]:
    rows = it.requests.handlers.store._db.execute("SELECT item, reason FROM items WHERE state = 'quarantined'")
    return [*rows]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_value_that_cannot_be_is_found_before_the_step(mesh, name: str) -> None:
    with threaded(groups=2, max_staleness=4) as it:
        it.call(lambda: stored(it, 6, lambda one: changed(one, name)))
        parts = Fake()
        learn(it, parts)
        assert parts.trained == [[0, 1], [2], [4, 5]]
        ((item, reason),) = it.call(lambda: quarantined(it))
        assert item == POISON and name in reason and f"{NUMBERS[name][1]:.0f}" in reason


def test_the_buffer_finds_it_when_it_reads_the_file_again(mesh) -> None:
    """Its own bounds are known since a restart; the learner gets no such group."""
    with threaded(groups=2, max_staleness=4, bounds=BOUNDS) as it:
        it.call(lambda: stored(it, 6, lambda one: changed(one, "tokens")))
        parts = Fake()
        learn(it, parts)
        assert parts.trained == [[0, 1], [2], [4, 5]]
        ((item, reason),) = it.call(lambda: quarantined(it))
        assert item == POISON and reason == "item 3, sample 1: tokens: 1000000 at token 5; a token is 0 to 63"


def test_a_group_whose_gradient_alone_is_not_finite_is_found_after_the_step(mesh) -> None:
    class NotFinite(Fake):
        def step(self, policy: Any, part: Any) -> dict[str, float]:
            stats = super().step(policy, part)
            return stats | {"gradient/skipped": float(POISON in self.trained[-1])}

        def rehearse(self, policy: Any, part: Any) -> bool:
            return bool(part.rows.item.numpy()[0] != POISON)

    with threaded(groups=2, max_staleness=4) as it:
        it.call(lambda: stored(it, 6))
        parts = NotFinite()
        learn(it, parts)
        assert parts.trained == [[0, 1], [2, 3], [2], [4, 5]] and parts.version == 3
        ((item, reason),) = it.call(lambda: quarantined(it))
        assert item == POISON and "gradient is not finite" in reason


def test_where_no_gradient_is_finite_no_group_is_at_fault(mesh) -> None:
    class Broken(Fake):
        def step(self, policy: Any, part: Any) -> dict[str, float]:
            return super().step(policy, part) | {"gradient/skipped": 1.0}

        def rehearse(self, policy: Any, part: Any) -> bool:
            return False

    with threaded(groups=2, max_staleness=4) as it:
        it.call(lambda: stored(it, 6))
        parts = Broken()
        learn(it, parts)
        assert len(parts.trained) == 3 and it.call(lambda: quarantined(it)) == []


class Deadly(Fake):
    """The process that computes the group is killed before it can say why."""

    def __init__(self, alone: bool = True) -> None:
        super().__init__()
        self.alone, self.rehearsed = alone, list[int]()

    def step(self, policy: Any, part: Any) -> dict[str, float]:
        if POISON in part.rows.item.numpy():
            raise Killed
        return super().step(policy, part)

    def rehearse(self, policy: Any, part: Any) -> bool:
        self.rehearsed.append(int(part.rows.item.numpy()[0]))
        if self.alone and self.rehearsed[-1] == POISON:
            raise Killed
        return True


def test_a_group_that_kills_the_learner_is_found_by_trying_each_alone(mesh) -> None:
    with threaded(groups=2, max_staleness=4) as it:
        it.call(lambda: stored(it, 6))
        parts = Deadly()
        for start in range(2 * MOST_ENDS):
            with pytest.raises(Killed):
                learn(it, parts)
            assert parts.rehearsed == [2, POISON] * max(0, start + 1 - MOST_ENDS)
        learn(it, parts)
        assert parts.trained == [[0, 1], [2], [4, 5]] and parts.version == 3
        ((item, reason),) = it.call(lambda: quarantined(it))
        assert item == POISON and reason == "the learner ended 2 times while it tried this group by itself"


def test_a_batch_that_kills_the_learner_only_as_a_whole_names_no_group(mesh) -> None:
    with threaded(groups=2, max_staleness=4) as it:
        it.call(lambda: stored(it, 6))
        parts = Deadly(alone=False)
        for _ in range(5):
            with pytest.raises(Killed):
                learn(it, parts)
        assert parts.rehearsed == [2, 3] * 3 and it.call(lambda: quarantined(it)) == []


def test_a_picture_that_is_another_one_is_its_group_s_fault_unless_all_are(tmp_path: Path, mesh) -> None:
    """Its digest, or the number of its placeholders."""
    model = seeing_model(tmp_path / "model", "qwen3_vl")
    form, pictured = form_of(model), make_pictured(form_of(model))
    row = next(row for row, entry in enumerate(pictured.entries) if Sample.unpack(entry.sample).images)
    one = Sample.unpack(pictured.entries[row].sample)
    other = one.images[0].model_copy(update={"digest": "0" * 64})
    tokens = one.tokens.numpy().copy()
    tokens[one.images[0].start + 1] = 9
    for changes in ({"images": [other, *one.images[1:]]}, {"tokens": Array.of(tokens)}):
        entries = list(pictured.entries)
        entries[row] = entries[row]._replace(sample=one.model_copy(update=changes).pack())
        part = pictured._replace(entries=entries).part(3, [len(entries)], 0)
        found, every = mismatched(part, form)
        assert list(found) == [entries[row].item] and not every
        assert mismatched(only(part, entries[row].item), form)[1]


@pytest.mark.xdist_group("ranks")
def test_two_ranks_take_the_same_batch_again_whichever_finds_the_group(tmp_path: Path) -> None:
    with threaded(groups=2, max_staleness=4) as it:
        it.call(lambda: stored(it, 6, lambda one: changed(one, "tokens")))
        world.together("sound", 2, tmp_path, address=it.address)
        first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
        assert first == second == [[0, 0, 1, 1], [2, 2], [4, 4, 5, 5]]
        ((item, reason),) = it.call(lambda: quarantined(it))
        assert item == POISON and "tokens: 1000000" in reason


def test_a_rehearsal_leaves_policy_and_optimizer_as_they_were(tmp_path: Path, mesh) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    step, before = algorithm_of(policy, 64), world.weights(policy)
    entries = make_samples()
    part = cut(entries, 3, [len(entries)], 0)
    assert step.rehearse(policy, only(part, 2)) is True
    assert all(torch.equal(before[name], tensor) for name, tensor in world.weights(policy).items())
    assert all(parameter.grad is None for parameter in policy.parameters()) and not step.optimizer.adamw.state
    with torch.no_grad():
        next(policy.parameters()).to_local().fill_(torch.nan)
    assert step.rehearse(policy, only(part, 2)) is False


def test_a_group_alone_is_its_rows_and_this_rank_s_samples() -> None:
    entries = make_samples(groups=3, size=2)
    part = cut(entries, 3, [3, 3], 1)
    alone = only(part, 1)
    assert alone.rows.item.numpy().tolist() == [1, 1] and alone.positions.numpy().tolist() == [1]
    assert alone.samples == [entries[3].sample] and only(part, 0).samples == []
    assert alone.rows.metrics["right"].numpy().tolist() == [entry.rewards[i] for i, entry in enumerate(entries[2:4])]


def test_a_policy_allows_its_own_vocabulary_and_versions_up_to_its_own(tmp_path: Path, mesh) -> None:
    bounds = bounds_of(policy_of(tiny_model(tmp_path), mesh), None)
    assert bounds == Bounds(vocabulary=64)
    entries = make_samples(version=3)
    part = cut(entries, 3, [len(entries)], 0)
    assert judged(part, bounds) == {}
    older = part.model_copy(update={"version": 1})
    assert "no policy above version 1 exists" in judged(older, bounds)[0]
    assert judged(older.model_copy(update={"reached": 3}), bounds) == {}


def test_each_group_with_wrong_samples_is_found_and_its_first_is_named() -> None:
    entries = make_samples(groups=20, size=5)
    part = cut(entries, 3, [len(entries)], 0)
    samples = list(part.samples)
    for row, name in {13: "tokens", 14: "versions", 47: "behaviour_logprobs", 99: "versions"}.items():
        samples[row] = changed(Sample.unpack(samples[row]), name)
    found = judged(part.model_copy(update={"samples": samples}), BOUNDS)
    words = {2: "sample 13 of batch 3: tokens: 1000000", 9: "sample 47 of batch 3: behaviour_logprobs: nan"}
    words[19] = "sample 99 of batch 3: versions: sampled under version 7, and no policy above version 3 exists"
    assert list(found) == list(words) and all(found[item].startswith(text) for item, text in words.items())
