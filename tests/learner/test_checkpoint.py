"""Checkpoints: resuming changes nothing, incomplete ones are skipped, a full disk is reported, old ones are removed."""

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.supervise.accept import Source, copy
from configs import certificate
from configs.certificate import Certificate
from configs.checkpoint_files import MANIFEST, complete, fault, folder_of, newest
from configs.load import ConfigError
from configs.schema import LearnerConfig
from learner.checkpoint import Checkpoints, NoDiskSpace
from learner.saved import export
from learner.saved.manifest import DataPosition, discard, reward_of, seal, versions_to_keep
from learner.train.optimizer import Optimizer
from tests.harness import rank, world
from tests.harness.expert_batches import expert_model
from tests.harness.lanes import long_but
from tests.harness.world import LEARNER, policy_of, tiny_model


def may_mount() -> bool:
    """Whether this process may mount a tmpfs, tried in a namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    trial = ["unshare", "--mount", "mount", "-t", "tmpfs", "headrace", "/mnt"]
    return subprocess.run(trial, capture_output=True).returncode == 0


MAY_MOUNT = may_mount()


def parts(tmp_path: Path, mesh, versions: int = 100, **changes):
    model = tiny_model(tmp_path / "model")
    learner = LEARNER.model_copy(update={"checkpoint_every": 2, "keep_checkpoints": 2} | changes)
    policy = policy_of(model, mesh)
    optimizer = Optimizer(policy, learner, versions)
    return policy, Checkpoints(tmp_path / "checkpoints", model, learner, optimizer, versions)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def same(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_resumed_is_uninterrupted(tmp_path: Path, mesh) -> None:
    """Bit for bit: metrics, weights, and thereby the optimizer's state."""
    tiny_model(tmp_path / "a" / "model")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    whole = rank.run(tmp_path / "a", mesh, 0, 0, 5, [24])
    first = rank.run(tmp_path / "b", mesh, 0, 0, 3, [24])  # its version 3 is lost: 2 was the checkpoint
    again = rank.run(tmp_path / "b", mesh, 0, 2, 5, [24])
    assert whole["records"] == first["records"][:2] + again["records"]
    assert same(whole["weights"], again["weights"])


@pytest.mark.xdist_group("ranks")
def test_across_numbers_of_ranks(tmp_path: Path, mesh) -> None:
    """Two ranks write, one goes on; one writes, two go on: as one rank alone would have."""
    tiny_model(tmp_path / "a" / "model", tied=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    whole = rank.run(tmp_path / "a", mesh, 0, 0, 6, [24])
    world.together("train", 2, tmp_path / "b", start=0, stop=2, cuts=[10, 14], name="first")
    rank.run(tmp_path / "b", mesh, 0, 2, 4, [24])
    world.together("train", 2, tmp_path / "b", start=4, stop=6, cuts=[24, 0], name="last")
    last = torch.load(tmp_path / "b" / "last.pt")
    for name, tensor in whole["weights"].items():
        if "k_proj.bias" not in name:  # attention does not depend on it: Adam blows up the rounding of its gradient
            assert (last["weights"][name] - tensor).norm() < 1e-3 * tensor.norm(), name
    for got, want in zip(last["records"], whole["records"][4:], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-3, abs=1e-5)


def test_what_is_written_is_the_moment_of_saving(tmp_path: Path, mesh) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    before = world.weights(policy)
    checkpoints.save(policy, 2)
    with torch.no_grad():  # while the writing thread is at work
        for parameter in policy.parameters():
            parameter.zero_()
    checkpoints.close()
    other, restoring = parts(tmp_path, mesh)
    assert restoring.restore(other) == 2
    assert same(world.weights(other), before)
    restoring.close()


def test_which_versions_are_written_and_kept(tmp_path: Path, mesh) -> None:
    policy, checkpoints = parts(tmp_path, mesh, versions=7, export_every=4)
    oldest = []
    for version in range(1, 8):
        oldest.append(checkpoints.save(policy, version))
        checkpoints._wait()
    checkpoints.finish(policy, 7)
    folder = tmp_path / "checkpoints"
    assert complete(folder) == [6, 7]
    assert [path.name for path in sorted(folder.iterdir())] == ["v000006", "v000007"]
    assert oldest == [0, 0, 2, 2, 2, 2, 4]  # of what is complete when the next one has only begun
    assert (folder / "v000007" / "huggingface").exists() and not (folder / "v000006" / "huggingface").exists()
    checkpoints.close()


def test_no_other_user_writes_into_a_checkpoint_whatever_the_umask(tmp_path: Path, mesh) -> None:
    """Whoever may read an export passes through the folders above it, and can neither list nor change them."""
    policy, checkpoints = parts(tmp_path, mesh, versions=1)
    before = os.umask(0)
    try:
        checkpoints.finish(policy, 1)
        certificate.write(Certificate(model="m", kind="qwen2", key="k"), tmp_path / "certificate.json")
    finally:
        os.umask(before)
    checkpoints.close()
    folder = tmp_path / "checkpoints"
    version = folder_of(folder, 1)
    passed, own = [folder, version], [version / "state", version / MANIFEST, tmp_path / "certificate.json"]
    assert [path.stat().st_mode & 0o077 for path in (*passed, *own)] == [0o011, 0o011, 0, 0, 0]


@given(
    rewards=st.dictionaries(st.integers(1, 60), st.none() | st.floats(0, 1)),
    last=st.integers(1, 4),
    every=st.none() | st.integers(1, 20),
    best=st.integers(0, 4),
)
def test_versions_to_keep(rewards: dict[int, float | None], last: int, every: int | None, best: int) -> None:
    changes = {"keep_checkpoints": last, "keep_every": every, "keep_best": best}
    stay = versions_to_keep(rewards, LEARNER.model_copy(update=changes))
    assert set(sorted(rewards)[-last:]) <= stay <= rewards.keys()
    assert all(version in stay for version in rewards if every and version % every == 0)
    known = {version for version, reward in rewards.items() if reward is not None}
    for gone in known - stay:
        assert sum(rewards[version] >= rewards[gone] for version in stay & known) >= best
    if every is None:
        assert len(stay) <= last + best


def test_every_so_many_and_the_best_are_kept(tmp_path: Path, mesh) -> None:
    changes = {"checkpoint_every": 1, "keep_checkpoints": 1, "keep_every": 3, "keep_best": 1}
    policy, checkpoints = parts(tmp_path, mesh, **changes)
    oldest = []
    for version, reward in enumerate([0.1, 0.9, 0.2, 0.3, 0.8], 1):
        oldest.append(checkpoints.save(policy, version, reward))
        checkpoints._wait()
    assert complete(tmp_path / "checkpoints") == [2, 3, 5]
    assert oldest == [0, 1, 2, 3, 4]  # the buffer need not keep batches for those that no restart restores
    checkpoints.close()


def test_the_reward_outlives_a_restart_and_a_later_export(tmp_path: Path, mesh) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    checkpoints.save(policy, 2, 0.5)
    checkpoints.save(policy, 3, 0.25)
    checkpoints.close()
    other, restarted = parts(tmp_path, mesh)
    assert restarted.restore(other) == 2
    restarted.finish(other, 2)  # writes it again, with the export
    assert (tmp_path / "checkpoints" / "v000002" / "huggingface").exists()
    assert reward_of(tmp_path / "checkpoints" / "v000002") == 0.5
    restarted.save(other, 3, 0.25)
    restarted.finish(other, 3)  # not due by itself
    assert reward_of(tmp_path / "checkpoints" / "v000003") == 0.25
    restarted.close()


def as_an_earlier_release_wrote_it(checkpoint: Path) -> None:
    """The manifest had the files alone, and the reward a file of its own."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / "figures.json").write_text(json.dumps({"reward": manifest["reward"]}))
    size = (checkpoint / "figures.json").stat().st_size
    (checkpoint / MANIFEST).write_text(json.dumps(manifest["files"] | {"figures.json": size}))


def test_checkpoints_of_an_earlier_release_restore_and_keep_their_rank(tmp_path: Path, mesh) -> None:
    changes = {"checkpoint_every": 1, "keep_checkpoints": 1, "keep_best": 1}
    policy, checkpoints = parts(tmp_path, mesh, **changes)
    folder, before = tmp_path / "checkpoints", world.weights(policy)
    for version, reward in enumerate([0.9, 0.1], 1):
        checkpoints.save(policy, version, reward)
        checkpoints._wait()
        as_an_earlier_release_wrote_it(folder_of(folder, version))
    checkpoints.close()
    assert complete(folder) == [1, 2] and reward_of(folder_of(folder, 1)) == 0.9
    other, restarted = parts(tmp_path, mesh, **changes)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert restarted.restore(other) == 2 and same(world.weights(other), before)
    restarted.save(other, 3, 0.3)
    restarted.close()
    assert complete(folder) == [1, 3]
    (folder_of(folder, 1) / "figures.json").write_text("{")
    assert fault(folder_of(folder, 1)) is not None


def test_finish_writes_what_is_not_there(tmp_path: Path, mesh) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    checkpoints.finish(policy, 0)
    assert complete(tmp_path / "checkpoints") == []
    checkpoints.save(policy, 2)
    checkpoints.finish(policy, 2)  # drained there: the export is still to come
    assert (tmp_path / "checkpoints" / "v000002" / "huggingface" / "model.safetensors").exists()
    checkpoints.finish(policy, 3)
    assert complete(tmp_path / "checkpoints") == [2, 3]
    assert not list((tmp_path / "checkpoints").glob("*.old"))
    checkpoints.close()


def damage_truncate(folder: Path) -> None:
    shard = next((folder / "state").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])


def damage_remove(folder: Path) -> None:
    (folder / "state" / ".metadata").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"state')


def damage_listed(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


def damage_unsealed(folder: Path) -> None:
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize(
    "damage", long_but([damage_truncate, damage_remove, damage_manifest, damage_listed, damage_unsealed], 0, 2, 4)
)
def test_a_broken_one_is_skipped(tmp_path: Path, mesh, damage, caplog: pytest.LogCaptureFixture) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    for version in (2, 4):
        checkpoints.save(policy, version)
    checkpoints.close()
    damage(tmp_path / "checkpoints" / "v000004")
    (tmp_path / "checkpoints" / "v000006.tmp" / "state").mkdir(parents=True)  # killed while writing
    other, restoring = parts(tmp_path, mesh)
    with caplog.at_level(logging.WARNING):
        assert restoring.restore(other) == 2
    assert len(warnings(caplog)) == 1 and "v000004 is incomplete and skipped" in caplog.text
    assert restoring.save(other, 4) == 2  # written anew, in its place
    restoring.close()
    assert complete(tmp_path / "checkpoints") == [2, 4]
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_hidden_layers": 3}, "has no model.model.layers.2."),
        ({"intermediate_size": 48}, "holds model.model.layers.0.mlp."),
    ],
    ids=["another layer", "wider layers"],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, mesh, other: dict, words: str) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    checkpoints.save(policy, 2)
    checkpoints.finish(policy, 2)
    shutil.rmtree(tmp_path / "model")
    model = tiny_model(tmp_path / "model", **other)
    policy = policy_of(model, mesh)
    again = Checkpoints(tmp_path / "checkpoints", model, LEARNER, Optimizer(policy, LEARNER, 100), 100)
    with pytest.raises(ConfigError, match=r"^model.path: .* is of another model: it ") as refused:
        again.restore(policy)
    assert words in str(refused.value) and str(refused.value).count("\n") == 0


def test_a_fork_has_demonstrations_of_its_own(tmp_path: Path, mesh) -> None:
    """Others, or none, or the first ones, whatever the run that it begins from had."""
    model = tiny_model(tmp_path / "model")
    policy = policy_of(model, mesh)
    given = model, LEARNER.model_copy(update={"checkpoint_every": 2}), Optimizer(policy, LEARNER, 100), 100, None
    old, new = tmp_path / "old" / "checkpoints", tmp_path / "new" / "checkpoints"
    first = Checkpoints(old, *given, lambda version: DataPosition(data="8c2f0e1b9a3d4c57", rows=version, beside=True))
    first.save(policy, 2)
    first.close()
    copy(Source(folder_of(old, 2), 2), new.parent)
    for other in (None, lambda version: DataPosition(data="8c2f0e1b9a3d4c57", rows=9 * version, beside=True)):
        assert Checkpoints(new, *given, other).restore(policy) == 2
        with pytest.raises(ConfigError, match=r"run.name: .* is a checkpoint of|data.demonstrations: the demonstr"):
            Checkpoints(old, *given, other).restore(policy)


def test_nothing_to_restore(tmp_path: Path, mesh) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    assert checkpoints.restore(policy) == 0
    checkpoints.close()


def test_a_full_disk_is_refused_with_numbers(tmp_path: Path, mesh, caplog, monkeypatch) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with caplog.at_level(logging.WARNING):
        assert checkpoints.save(policy, 2) == 0
    assert len(warnings(caplog)) == 1
    assert "checkpoint v000002 not written: it takes 0.06 GiB" in caplog.text and "has 0.00 GiB free" in caplog.text
    with pytest.raises(NoDiskSpace, match="version 3 is not on disk"):
        checkpoints.finish(policy, 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    checkpoints.finish(policy, 3)
    assert complete(tmp_path / "checkpoints") == [3]
    checkpoints.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "headrace", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(not MAY_MOUNT, reason="needs the right to mount a tmpfs; the test above simulates it")
def test_a_small_disk_is_refused_and_training_goes_on(tmp_path: Path, mesh, small_disk: Path, caplog) -> None:
    tiny_model(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        result = rank.run(tmp_path, mesh, 0, 0, 3, [24])
    assert [record["gradient/skipped"] for record in result["records"]] == [0, 0, 0]
    assert "checkpoint v000002 not written: it takes 0.06 GiB" in caplog.text and "0.00 GiB free" in caplog.text
    assert complete(small_disk) == []


def test_writing_that_fails_costs_a_warning(tmp_path: Path, mesh, caplog) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    checkpoints.save(policy, 2)
    checkpoints._wait()
    (tmp_path / "model" / "config.json").unlink()  # what the export copies
    checkpoints.config = LearnerConfig(checkpoint_every=2, export_every=2)
    with caplog.at_level(logging.WARNING):
        checkpoints.save(policy, 4)
        assert checkpoints.save(policy, 5) == 2
        checkpoints.close()
    assert "checkpoint v000004 failed" in caplog.text
    assert newest(tmp_path / "checkpoints") == 2


@pytest.mark.parametrize("tied", [False, True])
def test_export_loads(tmp_path: Path, mesh, tied: bool, monkeypatch) -> None:
    model = tiny_model(tmp_path / "model", tied, torch.bfloat16)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    policy = policy_of(model, mesh)
    with torch.no_grad():
        next(policy.parameters()).add_(0.5)
    monkeypatch.setattr(export, "SHARD_BYTES", 1 << 14)
    export.write(export.collect(policy), model, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    } <= names and "model.safetensors" not in names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in policy.full_weights())
    assert loaded.dtype == torch.bfloat16
    files = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(files) > 1 and ("lm_head.weight" in {name for file in files for name in file}) is not tied


def test_export_of_experts_has_the_names_of_files(tmp_path: Path, mesh) -> None:
    """The names are those of the initial model, expert by expert, which every engine reads; transformers loads them."""
    model = expert_model(tmp_path / "model", num_experts=7)
    policy = policy_of(model, mesh)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.5)
    export.write(export.collect(policy), model, tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert {name: tensor.shape for name, tensor in after.items()} == {name: x.shape for name, x in before.items()}
    name = "model.layers.1.mlp.experts.6.up_proj.weight"
    torch.testing.assert_close(after[name], before[name] + 0.5)
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in policy.full_weights())


def test_seal_and_fault(tmp_path: Path) -> None:
    partial = tmp_path / "v000001.tmp"
    (partial / "state").mkdir(parents=True)
    (partial / "state" / "a").write_bytes(b"12345")
    seal(partial)
    assert not partial.exists() and fault(tmp_path / "v000001") is None
    (tmp_path / "v000001" / "state" / "a").write_bytes(b"123")
    assert fault(tmp_path / "v000001") == "state/a has 3 bytes instead of 5"
    (tmp_path / "v000001" / "state" / "a").unlink()
    assert fault(tmp_path / "v000001") == "state/a is missing"
    discard(tmp_path / "v000001")
    assert list(tmp_path.iterdir()) == []
