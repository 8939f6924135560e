"""A file that cannot be written is named in one line, and no half of it is left."""

import errno
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

from configs.writing import WriteError, full_disk, write_text, writing

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
