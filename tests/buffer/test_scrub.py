"""`python -m buffer scrub`: every byte of a run is read; one flipped bit in any file is noticed or harmless."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer import scrub
from buffer.keys import ROLES, TOKEN, make_keys
from buffer.store.faults import StoreError
from buffer.store.sqlite import Store
from buffer.store.witness import file_of
from configs.checkpoint_files import MANIFEST, newest
from configs.load import load, write
from learner.saved.manifest import seal, set_aside
from tests.buffer.store.test_damage import SEGMENT, as_schema_3, flip
from tests.buffer.store.test_sqlite import accept, ledger_of
from tests.harness.lanes import long_but


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run: a ledger, closed, with its samples, and two checkpoints."""
    folder = tmp_path_factory.mktemp("scrub")
    words = ["--model.path=m", "--data.train=d.jsonl", "--reward.function=math"]
    config = load([f"--run.folder={folder}", "--run.name=small", *words])
    with Store(config.run.path / "buffer.sqlite", fsync=False) as store:
        accept(store, ledger_of(store), 4, size=40)
    for version in (2, 4):
        partial = config.run.path / "checkpoints" / f"v{version:06d}.tmp"
        (partial / "state").mkdir(parents=True)
        (partial / "huggingface").mkdir()
        for name in ("state/__0_0.distcp", "state/.metadata", "huggingface/model.safetensors"):
            (partial / name).write_bytes(random.Random(name).randbytes(60))
        seal(partial, 0.25)
    write(config, config.run.path / "config.yaml")
    make_keys(config.run.path / "keys")
    return config.run.path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(whole, tmp_path / "run")
    yield tmp_path / "run"


def scrubbed(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = scrub.main([str(run)])
    return code, capsys.readouterr().out.splitlines()


def test_a_sound_run_has_exit_code_0(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = scrubbed(run, capsys)
    assert code == 0 and not any("damaged" in line for line in lines)
    assert any(line.endswith("pages and rows are sound") for line in lines)
    assert any(line.endswith("8 samples read") for line in lines)
    assert [line for line in lines if "3 files read" in line and "v00000" in line] == lines[-3:-1]
    assert lines[-1] == f"{run / 'keys'}: all keys are sound"


KEPT = [
    *("buffer.sqlite", "buffer.sqlite-commits", "buffer.sqlite-sums", str(SEGMENT)),
    *(f"checkpoints/v000004/{name}" for name in ("state/__0_0.distcp", "state/.metadata", MANIFEST)),
    "checkpoints/v000004/huggingface/model.safetensors",
    *(f"keys/{role}.public" for role in ROLES),
]
HARMLESS = {"config.yaml", "buffer.sqlite.lock", "launch.lock", ".keys.lock"} | {
    f"keys/{name}" for name in (TOKEN, *(f"{role}.secret" for role in ROLES))
}
"""What reads `config.yaml` compares it with its checksum; a lock's bytes mean nothing. A damaged token opens no server.
Some bits of a secret mean nothing; `test_curve.py` tries the others."""


def test_these_are_all_files_of_a_run(run: Path) -> None:
    found = {str(path.relative_to(run)).replace("v000002", "v000004") for path in run.rglob("*") if path.is_file()}
    assert found - HARMLESS == set(KEPT)


@pytest.mark.parametrize("name", long_but(KEPT, 0, 2, 3, 5, 7, 8))
def test_a_flipped_bit_in_any_file_is_noticed(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The ledger's file is the largest; of each file some bits are tried. In the segment, bits of samples; of a key its
    characters."""
    size = 8 * 40 if name == str(SEGMENT) or name.endswith(".public") else (run / name).stat().st_size * 8
    for bit in random.Random(name).sample(range(size), 15):
        flip(run / name, bit)
        code, lines = scrubbed(run, capsys)
        assert code == 1 and len([line for line in lines if line.startswith("damaged: ")]) == 1, (bit, lines)
        if name == "buffer.sqlite":
            with pytest.raises(StoreError):
                Store(run / name)
        if name.endswith(MANIFEST):
            assert newest(run / "checkpoints") == 2
        flip(run / name, bit)


def test_what_has_no_checksum_is_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_schema_3(run / "buffer.sqlite")
    file = run / "checkpoints" / "v000004" / MANIFEST
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({"reward": manifest["reward"], "files": manifest["files"]}))
    set_aside(run / "checkpoints" / "v000002")
    code, lines = scrubbed(run, capsys)
    assert code == 0 and any("8 samples read, 8 of them without a checksum" in line for line in lines)
    assert any("v000004: 3 files read, without checksums" in line for line in lines)
    assert any("v000002.damaged: set aside as damaged" in line for line in lines)


def test_a_lost_tail_and_a_missing_ledger_are_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copyfile(run / "buffer.sqlite", run / "copy")
    with Store(run / "buffer.sqlite") as store:
        accept(store, ledger_of(store), 1)
        noted = file_of(run / "buffer.sqlite").read_bytes()
    shutil.copyfile(run / "copy", run / "buffer.sqlite")
    file_of(run / "buffer.sqlite").write_bytes(noted)
    code, lines = scrubbed(run, capsys)
    assert code == 1 and any("lacks its last 1 commits" in line for line in lines)
    (run / "buffer.sqlite").unlink()
    code, lines = scrubbed(run, capsys)
    assert code == 1 and lines[0].startswith("damaged: ") and "is gone, with 2 commits" in lines[0]


def test_a_run_that_cannot_be_found_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        scrub.main([str(tmp_path / "nowhere")])
    assert end.value.code == 2
