"""A file that cannot be written is named in one line, and no half of it is left."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

from configs.writing import WriteError, draft_of, full_disk, write_error, write_text, writing
from tests.harness.toy import ROOT

FULL, NO_ROOM = "/dev/full", "No space left on device; make room on its disk"


def in_python(file: Path) -> None:
    with file.open("w") as made:
        made.write("text")


def by_pyarrow(file: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), file)


def by_tokenizers(file: Path) -> None:
    Tokenizer(models.BPE()).save(str(file))


@pytest.mark.parametrize("write", [in_python, by_pyarrow, by_tokenizers])
def test_a_full_disk_is_named_with_the_file_whatever_writes(tmp_path: Path, write) -> None:
    (tmp_path / "file").symlink_to(FULL)
    with pytest.raises(WriteError) as error, writing(tmp_path / "file"):
        write(tmp_path / "file")
    assert str(error.value) == f"{tmp_path}/file: {NO_ROOM}"
    missing = tmp_path / "none" / "file"
    line = "none/file: No such file or directory; make it writable, or name another place"
    with pytest.raises(WriteError, match=line), writing(missing):
        write(missing)


def test_a_copied_folder_names_what_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "file").write_text("text")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "file").symlink_to(FULL)
    with pytest.raises(WriteError, match=NO_ROOM), writing(tmp_path / "to"):
        shutil.copytree(tmp_path / "from", tmp_path / "to", dirs_exist_ok=True)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a fault"), ConnectionRefusedError(errno.ECONNREFUSED, ""), ValueError("(os error 5)")],
)
def test_all_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, writing(Path("file")):
        raise error
    assert caught.value is error and full_disk(error, "file") is None


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "base/config.json"),
        PermissionError(errno.EACCES, "Permission denied", "other/of-another-user"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "out/never-written"),
        RuntimeError("the model's weights: No such file or directory (os error 2)"),
        shutil.Error([("base/file", "out/file", "[Errno 13] Permission denied: 'base/file'")]),
    ],
    ids=["missing", "another user's", "missing below it", "missing, by Rust", "copied from another user"],
)
def test_a_file_that_cannot_be_read_is_no_fault_of_the_place(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    with pytest.raises(type(error)) as caught, writing(Path("out")):
        raise error
    assert caught.value is error


def test_a_place_that_refuses_is_named_whatever_part_of_it_does(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for at in ("file/out/run.yaml", "file/out", "file"):
        failed = NotADirectoryError(errno.ENOTDIR, "", str(tmp_path / at))
        with (
            pytest.raises(WriteError, match=f"{at}: Not a directory; make it writable"),
            writing(tmp_path / "file/out"),
        ):
            raise failed


def test_an_error_without_a_file_is_of_the_place_only_if_that_refuses(tmp_path: Path) -> None:
    error = RuntimeError("Permission denied (os error 13)")
    assert write_error(error, tmp_path / "none" / "file") and not write_error(error, tmp_path)
    with patch("configs.writing.can_write", lambda folder: folder == tmp_path):  # who tests may write everywhere
        assert not write_error(error, tmp_path) and not write_error(error, tmp_path / "file")


def test_two_processes_do_not_share_a_draft(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from configs.writing import *; print(draft_of(Path(sys.argv[1])))", "a/b"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert Path(done.stdout.strip()).parent == Path("a") and Path(done.stdout.strip()) != draft_of(Path("a/b"))


def test_only_a_disk_that_is_full_or_read_only_is_reported_wherever_it_was_found() -> None:
    assert str(full_disk(OSError(errno.ENOSPC, "full", "a"))) == f"a: {NO_ROOM}"
    assert (
        str(full_disk(OSError(errno.EROFS, "", "a")))
        == "a: Read-only file system; make it writable, or name another place"
    )
    assert full_disk(OSError(errno.ENOSPC, "full")) is None, "no file is known"
    assert full_disk(FileNotFoundError(errno.ENOENT, "", "a")) is None, "it may be a fault of the code"


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    file, draft = tmp_path / "file", tmp_path / f".file.{os.getpid()}"
    write_text(file, "before", private=True)
    assert file.stat().st_mode & 0o777 == 0o600
    draft.symlink_to(FULL)
    with pytest.raises(WriteError) as error:
        write_text(file, "after")
    assert str(error.value) == f"{file}: {NO_ROOM}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and file.read_text() == "before"
