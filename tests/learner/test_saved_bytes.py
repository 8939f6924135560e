"""The bytes of a checkpoint: damage is found and an older one taken, a kill loses nothing, no file runs a program."""

import io
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from configs.checkpoint_files import MANIFEST, SUMS, complete, damage, fault, listed, manifest_of, newest
from configs.load import ConfigError
from learner.saved.manifest import SUM_NOTE, recover, reward_of, seal
from learner.saved.shards import CLASSES, METADATA
from tests.harness import world
from tests.learner.test_checkpoint import parts, same


def flip(file: Path, bit: int) -> None:
    """Flip one bit."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def small(folder: Path, version: int, content: bytes = b"12345", sealed: bool = True) -> Path:
    partial = folder / f"v{version:06d}.tmp"
    (partial / "state").mkdir(parents=True)
    (partial / "state" / "a").write_bytes(content)
    (partial / "config.json").write_text("{}")
    if sealed:
        seal(partial, 0.5)
    return partial.with_suffix("")


def test_a_flipped_bit_in_any_shard_has_the_checkpoint_before_restored(tmp_path: Path, mesh, caplog) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    checkpoints.save(policy, 2)
    checkpoints._wait()
    before = world.weights(policy)
    with torch.no_grad():
        next(policy.parameters()).add_(1)
    checkpoints.save(policy, 4)
    checkpoints.close()
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "v000004", tmp_path / "whole")
    for file in sorted((tmp_path / "whole" / "state").iterdir()):
        for stale in (folder / "v000004", folder / "v000004.damaged"):
            shutil.rmtree(stale, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder / "v000004")
        flip(folder / "v000004" / "state" / file.name, 8 * file.stat().st_size // 2)
        caplog.clear()
        other, restoring = parts(tmp_path, mesh)
        with caplog.at_level(logging.INFO):
            assert restoring.restore(other) == 2
        assert same(world.weights(other), before) and complete(folder) == [2]
        (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert f"state/{file.name} is damaged: its CRC32C is" in line and "now called v000004.damaged" in line
        assert "restored version 2 from" in caplog.text
        restoring.close()
    other, restarted = parts(tmp_path, mesh)
    assert restarted.restore(other) == 2 and restarted.save(other, 4) == 2
    restarted.close()
    assert complete(folder) == [2, 4] and not (folder / "v000004.damaged").exists(), "it was made anew"


def test_the_manifest_has_the_checksum_of_every_file(tmp_path: Path, mesh) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    checkpoints.finish(policy, 3)
    checkpoints.close()
    folder = tmp_path / "checkpoints" / "v000003"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    assert listed(folder).sums.keys() == listed(folder).sizes.keys() == files and damage(folder) is None
    assert not list(folder.rglob(f"*{SUM_NOTE}")) and any(name.endswith(".distcp") for name in files)
    for name in files:
        flip(folder / name, 0)
        assert damage(folder) == damage(folder, [name]) and name in str(damage(folder))
        flip(folder / name, 0)


@pytest.mark.xdist_group("ranks")
def test_ranks_agree_on_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    """Each reads a share of the shards; the damage is in that of the second rank, which alone sees it."""
    world.tiny_model(tmp_path / "model")
    world.together("train", 2, tmp_path, start=0, stop=4, cuts=[12, 12], name="first")
    folder = tmp_path / "checkpoints" / "v000004"
    shares = sorted(name for name in listed(folder).sums if name.startswith("state/"))
    flip(folder / shares[1], 8 * listed(folder).sizes[shares[1]] - 9)
    world.together("train", 2, tmp_path, start=2, stop=3, cuts=[12, 12], name="again")
    assert (tmp_path / "checkpoints" / "v000004.damaged").is_dir()


def as_without_sums(checkpoint: Path) -> None:
    """As the release before wrote it."""
    manifest = manifest_of(checkpoint)
    del manifest[SUMS]
    (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=1))


def test_a_checkpoint_without_checksums_is_read_on(tmp_path: Path, mesh) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    checkpoints.save(policy, 2)
    checkpoints.close()
    as_without_sums(tmp_path / "checkpoints" / "v000002")
    other, restoring = parts(tmp_path, mesh)
    assert restoring.restore(other) == 2 and damage(tmp_path / "checkpoints" / "v000002") is None
    restoring.close()


@given(bit=st.integers(0, 10**6), sums=st.booleans())
def test_a_flipped_bit_in_a_manifest_is_noticed_or_harmless(tmp_path_factory, bit: int, sums: bool) -> None:
    folder = tmp_path_factory.mktemp("flip")
    checkpoint = small(folder, 1)
    if not sums:
        as_without_sums(checkpoint)
    before, size = manifest_of(checkpoint), (checkpoint / MANIFEST).stat().st_size
    flip(checkpoint / MANIFEST, bit % (8 * size))
    if fault(checkpoint) is None:
        after = manifest_of(checkpoint)
        assert after["files"] == before["files"], "the sizes are those of the files"
        assert not sums or after == before


@pytest.mark.parametrize("killed_at", [1, 2])
@pytest.mark.parametrize("look_first", [False, True])
def test_a_kill_between_the_renames_of_a_seal_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int, look_first: bool
) -> None:
    small(tmp_path, 3, b"old")
    partial, rename, calls = small(tmp_path, 3, b"newer", sealed=False).with_suffix(".tmp"), Path.rename, 0

    def dying(self: Path, target: Path) -> Path:
        nonlocal calls
        if calls == killed_at:
            raise KeyboardInterrupt
        calls += 1
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        patch.setattr(shutil, "rmtree", lambda *args, **keywords: dying(tmp_path, tmp_path))
        with pytest.raises(KeyboardInterrupt):
            seal(partial, 0.75)
    if look_first:  # the launcher, which changes nothing
        assert newest(tmp_path) == 3 and complete(tmp_path) == [3]
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["v000003"] and fault(tmp_path / "v000003") is None
    assert (tmp_path / "v000003" / "state" / "a").read_bytes() == b"newer" and reward_of(tmp_path / "v000003") == 0.75


def test_what_takes_the_place_of_a_checkpoint_and_is_not_whole_is_given_up(tmp_path: Path) -> None:
    small(tmp_path, 3, b"old").rename(tmp_path / "v000003.old")
    small(tmp_path, 3, b"newer", sealed=False)
    recover(tmp_path)
    assert (tmp_path / "v000003" / "state" / "a").read_bytes() == b"old" and complete(tmp_path) == [3]


class Program:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)

    def __deepcopy__(self, memo: object) -> "Program":
        return self


def dumped(what: object) -> bytes:
    """What torch's own writer would make of it."""
    stream = io.BytesIO()
    torch.serialization.pickle.dump(what, stream)
    return stream.getvalue()


def refers(module: str, name: str) -> Callable[[Path], bytes]:
    return lambda trap: f"c{module}\n{name}\n(S'{trap}'\ntR.".encode()


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda trap: dumped(Program(trap)), "posix.mkdir"),
        (lambda trap: dumped({"state_dict_metadata": [Program(trap)]}), "posix.mkdir"),
        (refers("builtins", "eval"), "builtins.eval"),
        (refers("os", "mkdir"), "os.mkdir"),
        (refers("torch", "load"), "torch.load"),
        (refers("torch.distributed.checkpoint.metadata", "os.mkdir"), "torch.distributed.checkpoint.metadata.os.mkdir"),
        (lambda trap: b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__subclasses__'\ntR.", "builtins.getattr"),
    ],
)
def test_an_index_that_could_run_a_program_is_refused_by_name(
    tmp_path: Path, mesh, made: Callable[[Path], bytes], named: str
) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    checkpoints.save(policy, 2)
    checkpoints.close()
    folder = tmp_path / "checkpoints" / "v000002"
    (folder / "state" / METADATA).write_bytes(made(tmp_path / "trap"))
    shutil.move(folder, folder.with_suffix(".tmp"))
    seal(folder.with_suffix(".tmp"))
    other, restoring = parts(tmp_path, mesh)
    with pytest.raises(ConfigError, match=rf"{METADATA}: refers to {named}\b.*it could run any program") as error:
        restoring.restore(other)
    assert not (tmp_path / "trap").exists() and "\n" not in str(error.value)
    restoring.close()


def test_a_value_that_could_run_a_program_is_refused_by_name(tmp_path: Path, mesh, monkeypatch) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    states = checkpoints._state(policy, 2)
    (group,) = states["optimizer"]["param_groups"][:1]
    group["betas"] = Program(tmp_path / "trap")
    monkeypatch.setattr(checkpoints, "_state", lambda policy, version: states)
    checkpoints.save(policy, 2)
    checkpoints.close()
    other, restoring = parts(tmp_path, mesh)
    with pytest.raises(ConfigError, match=r"state: refers to .*posix\.mkdir"):
        restoring.restore(other)
    assert not (tmp_path / "trap").exists()
    restoring.close()


def test_an_index_that_is_no_pickle_is_refused_in_a_line(tmp_path: Path, mesh) -> None:
    policy, checkpoints = parts(tmp_path, mesh)
    checkpoints.save(policy, 2)
    checkpoints.close()
    folder = tmp_path / "checkpoints" / "v000002"
    whole = (folder / "state" / METADATA).read_bytes()
    as_without_sums(folder)
    for cut in (b"", b"x" * len(whole), whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)):
        (folder / "state" / METADATA).write_bytes(cut.ljust(len(whole), b"\0"))
        other, restoring = parts(tmp_path, mesh)
        with pytest.raises((ConfigError, CheckpointException), match=r"\.metadata: (cannot be read|refers to)"):
            restoring.restore(other)
        restoring.close()


def test_the_classes_of_an_index_are_those_that_torch_has(tmp_path: Path) -> None:
    for module, name in CLASSES:
        if module != "pathlib._local":
            found = __import__(module, fromlist=[name])
            assert hasattr(found, name), f"{module}.{name}"
