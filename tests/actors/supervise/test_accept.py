"""What the launcher reads of a run's folder before it starts anything, without processes."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from actors.supervise import accept
from buffer.store import start_checks
from buffer.store.faults import StoreError
from buffer.store.lock import locked
from buffer.store.past import BEGINS, accept_loss, history, past
from buffer.store.sqlite import Store, reading
from buffer.store.witness import Commits, Witness, file_of
from configs.checkpoint_files import fault, manifest_of
from configs.load import ConfigError, load, write
from configs.resume import changes, settings
from configs.schema import Config
from configs.writing import WriteError, draft_of
from learner.saved.manifest import seal


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return [f"--run.folder={tmp_path}", "--model.path=m", "--data.train=d.jsonl", "--reward.function=math"]


def served(config: Config) -> None:
    """Begin the run's ledger, and write its config as the buffer does."""
    with Store(config.run.path / "buffer.sqlite") as store:
        store.record_settings(settings(config), changes(past(config).settings, config))
    write(config, config.run.path / "config.yaml")


def checkpoint(run: Path, version: int) -> None:
    partial = run / "checkpoints" / f"v{version:06d}.tmp"
    (partial / "state").mkdir(parents=True)
    (partial / "state" / "a").write_bytes(b"12345")
    seal(partial)


def tell(config: Config, **counters: int) -> None:
    """Have the ledger's file say so, as if the buffer had written it."""
    with closing(sqlite3.connect(config.run.path / "buffer.sqlite", isolation_level=None)) as db:
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", counters.items())
    start_checks.begin_sums(config.run.path / "buffer.sqlite")


def test_a_new_run_and_a_changed_one(words: list[str]) -> None:
    config = load(words)
    assert accept.hold(config) is None and accept.judge(config) == ([], None)
    served(config)
    news = ["changed since the last launch: run.versions: 100 -> 7"]
    assert accept.judge(load([*words, "--run.versions=7"])) == (news, None)
    served(load([*words, "--run.versions=7"]))
    with closing(reading(config.run.path / "buffer.sqlite")) as db:
        assert [(version, str(change)) for version, change in history(db)] == [(0, "run.versions: 100 -> 7")]
    with pytest.raises(ConfigError, match=r"model.path: \"m\" -> \"n\"; .* --fork-from"):
        accept.judge(load([*words, "--model.path=n"]))


def test_a_run_of_an_earlier_release_is_judged_by_its_config(words: list[str]) -> None:
    """Its ledger has a fingerprint over other keys, and no settings."""
    config = load(words)
    Store(config.run.path / "buffer.sqlite").close()
    tell(config, fingerprint="c351d8533e631075")
    write(config, config.run.path / "config.yaml")
    (line,), _ = accept.judge(load([*words, "--learner.lr=1e-3"]))
    assert line.endswith("learner.lr: 1e-06 -> 0.001")
    with pytest.raises(ConfigError, match=r"batch.groups: 32 -> 16;"):
        accept.judge(load([*words, "--batch.groups=16"]))
    with closing(reading(config.run.path / "buffer.sqlite")) as db:
        assert list(history(db)) == []
    served(load([*words, "--learner.lr=1e-3"]))


def test_finished_by_its_versions_or_by_its_data(words: list[str]) -> None:
    config = load([*words, "--data.epochs=2"])
    served(config)
    checkpoint(config.run.path, 6)
    tell(config, version=6, last_trained=5, problems=8, next_item=16, oldest=6)
    _, finished = accept.judge(config)
    assert finished and "data ended at version 6 of 100" in finished and "raise data.epochs" in finished
    assert accept.judge(load([*words, "--data.epochs=3"]))[1] is None
    _, finished = accept.judge(load([*words, "--data.epochs=3", "--run.versions=6"]))
    assert finished and "version 6 of 6" in finished and "raise run.versions" in finished


def test_none_yet_is_not_lost(words: list[str]) -> None:
    """Trained without a checkpoint: it begins again on the same batches. With batches gone, it cannot."""
    config = load(words)
    served(config)
    tell(config, version=3, last_trained=2, problems=8, next_item=16, oldest=0)
    (line,), finished = accept.judge(config)
    assert "no checkpoint yet; the 3 versions trained so far are trained again" in line and finished is None
    tell(config, oldest=2)
    with pytest.raises(ConfigError, match="there is none in it, but the run was trained to version 3"):
        accept.judge(config)


@pytest.mark.parametrize("lock", ["launch.lock", "buffer.sqlite.lock"])
def test_a_run_that_somebody_runs_is_refused(words: list[str], lock: str) -> None:
    config = load(words)
    served(config)
    locked(config.run.path / lock)
    with pytest.raises(ConfigError, match=r"in use by process \d+: see .* status"):
        accept.hold(config)


def test_a_fork_onto_a_full_disk_leaves_nothing_of_itself(words: list[str]) -> None:
    old, new = load([*words, "--run.name=old"]), load([*words, "--run.name=new"])
    served(old)
    checkpoint(old.run.path, 2)
    (new.run.path / "checkpoints").mkdir(parents=True)
    draft_of(new.run.path / BEGINS).symlink_to("/dev/full")
    found = accept.source(new, "old")
    with pytest.raises(WriteError, match=rf"new/{BEGINS}: No space left on device; make room on its disk"):
        accept.copy(found, new.run.path)
    assert [path.name for path in new.run.path.rglob("*")] == ["checkpoints"]
    accept.copy(found, new.run.path)
    assert accept.judge(new) == ([], None)


def test_forks(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"hidden_size": 64}))
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "config.json").write_text(json.dumps({"hidden_size": 96}))
    words = [*words, f"--model.path={tmp_path}/m", "--run.name"]
    old, new = load([*words, "old"]), load([*words, "new", "--learner.lr=1"])
    served(old)
    checkpoint(old.run.path, 2)
    checkpoint(old.run.path, 4)
    assert accept.source(new, "old").version == 4
    found = accept.source(new, f"{old.run.path}@v2")
    accept.copy(found, new.run.path)
    assert accept.judge(new) == ([], None)
    theirs, ours = (each.run.path / "checkpoints" / "v000002" for each in (old, new))
    assert (ours / "state" / "a").read_bytes() == b"12345" and fault(ours) is None
    assert manifest_of(ours)["forked"] and "forked" not in manifest_of(theirs)
    for argv, name, told in (
        (["new"], "old", "new has begun already"),
        (["third"], "nowhere", "no such folder, nor is it a run"),
        (["third"], "old@v3", "has no checkpoint 3; complete checkpoints: v2, v4"),
        (["third", "--run.versions=4"], "old", "run.versions: 4 is not above 4"),
        (["third", f"--model.path={tmp_path}/n"], "old", "has hidden_size 96, the model of"),
    ):
        with pytest.raises(ConfigError, match=told):
            accept.source(load([*words, *argv]), name)


RANGE = "--rollout.servers={min: 2, max: 5}"


@pytest.mark.parametrize(
    ("word", "known", "by_person", "servers"),
    [
        ("--rollout.servers=3", 0, 0, (3, 3)),
        ("--rollout.servers=3", 5, 1, (3, 3)),  # the fleet places the other two
        ("--rollout.servers=3", 1, 1, (1, 3)),
        ("--rollout.servers=3", 5, 0, (3, 3)),
        (RANGE, 0, 0, (2, 2)),
        (RANGE, 4, 0, (2, 4)),
        (RANGE, 9, 0, (2, 5)),
        (RANGE, 4, 1, (2, 2)),
    ],
)
def test_a_run_goes_on_with_the_servers_that_were_wanted_last(
    words: list[str], word: str, known: int, by_person: int, servers: tuple[int, int]
) -> None:
    config = load([*words, word])
    assert accept.servers(config) == (config.rollout.least_servers,) * 2
    served(config)
    tell(config, wanted_servers=known, wanted_by_person=by_person)
    assert accept.servers(config) == servers


def test_a_new_number_in_the_run_file_is_newer_than_a_persons(words: list[str]) -> None:
    served(load([*words, "--rollout.servers=3"]))
    tell(load(words), wanted_servers=1, wanted_by_person=1)
    assert accept.servers(load([*words, "--rollout.servers=4"])) == (4, 4)


def lose_ledger(config: Config) -> None:
    for file in config.run.path.glob("buffer.sqlite*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()


def test_checkpoints_without_a_ledger_are_refused_unless_it_is_meant(words: list[str]) -> None:
    config = load(words)
    served(config)
    checkpoint(config.run.path, 20)
    lose_ledger(config)
    with pytest.raises(
        ConfigError, match=r"checkpoints has version 20, and the ledger is gone: .* --accept-loss"
    ) as error:
        accept.judge(config)
    assert "\n" not in str(error.value)
    (line,), finished = accept.judge(config, loss_accepted=True)
    assert line.startswith("accepted: buffer.path") and finished is None
    accept_loss(config)
    assert accept.judge(config) == ([], None), "it is accepted once"
    served(config)
    assert accept.judge(config) == ([], None)
    lose_ledger(config)
    assert accept.judge(config) == ([], None), "a ledger that begins with version 20 may begin anew"
    checkpoint(config.run.path, 21)
    with pytest.raises(ConfigError, match="version 21, and the ledger is gone"):
        accept.judge(config)


def test_a_ledger_that_lacks_commits_is_refused_unless_it_is_meant(words: list[str]) -> None:
    config = load(words)
    served(config)
    file = config.run.path / "buffer.sqlite"
    shutil.copyfile(file, config.run.path / "copy")
    served(load([*words, "--run.versions=7"]))
    noted = file_of(file).read_bytes().split()
    shutil.copyfile(config.run.path / "copy", file)
    Witness(file, Commits(noted[0].decode(), int(noted[1])))  # as a buffer that was killed leaves it
    with pytest.raises(ConfigError, match="lacks its last 1 commits of 2"):
        accept.judge(config)
    (line,), _ = accept.judge(config, loss_accepted=True)
    assert "accepted: " in line
    accept_loss(config)
    assert accept.judge(config) == ([], None)
    served(config)
    file.unlink()
    with pytest.raises(ConfigError, match="is gone, with 1 commits"):
        accept.judge(config)
    accept_loss(config)
    assert accept.judge(config) == ([], None)


def test_a_ledger_in_memory_is_nowhere_else(words: list[str]) -> None:
    config = load([*words, "--buffer.path=null"])
    checkpoint(config.run.path, 20)
    assert accept.judge(config) == ([], None)


def test_a_damaged_ledger_is_refused_in_words(words: list[str]) -> None:
    config = load(words)
    served(config)
    file = config.run.path / "buffer.sqlite"
    data = file.read_bytes()
    file.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    with pytest.raises(StoreError, match=r"the file is damaged: .*malformed"):
        accept.judge(config)


def test_no_fork_begins_from_a_damaged_checkpoint(words: list[str]) -> None:
    words = [*words, "--run.name"]
    old = load([*words, "old"])
    served(old)
    checkpoint(old.run.path, 2)
    (old.run.path / "checkpoints" / "v000002" / "state" / "a").write_bytes(b"12344")
    with pytest.raises(ConfigError, match="v000002: state/a is damaged: its CRC32C"):
        accept.source(load([*words, "new"]), "old")
