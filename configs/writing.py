"""Writes the files of commands: whole or not at all, and with one line for people where that fails."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from configs.variables import can_write, open_private

MAKE_ROOM, ELSEWHERE = "make room on its disk", "make it writable, or name another place"
FULL = {errno.ENOSPC, errno.EDQUOT}
DISK = FULL | {errno.EROFS}
REFUSED = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
NUMBER = re.compile(r"(?:os error|[Ee]rrno) (\d+)")
"""Finds the number in the text of errors without `errno`: of libraries in Rust, and those that shutil gathers."""


class WriteError(OSError):
    """A file cannot be written: its name, the reason and the remedy, in one line."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}; {MAKE_ROOM if self.errno in FULL else ELSEWHERE}"


def write_error(error: Exception, place: Path | str | None = None) -> WriteError | None:
    """Return the line for a failed write; None for any other error. The line names the file that `error` names, and
    `place` where that is its draft or there is none."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := NUMBER.search(str(error))):
        number = int(found[1])
    names = [getattr(error, name, None) for name in ("filename2", "filename")]  # the second is what shutil copies
    named = next((Path(os.fsdecode(name)) for name in names if isinstance(name, str | bytes | Path)), None)
    file = place if named is None or (place and _is_draft(named, Path(place))) else named
    if number is None or file is None:
        return None
    if number in DISK or (number in REFUSED and place and _refuses(number, named, Path(place))):
        return WriteError(number, os.strerror(number), str(file))
    return None


def _is_draft(file: Path, place: Path) -> bool:
    return file.absolute().parent == place.absolute().parent and place.name in file.name


def _refuses(number: int, named: Path | None, place: Path) -> bool:
    """Whether the error is of the write to `place`. Code that writes also reads files, which may be missing or another
    user's."""
    if named is None:
        return not can_write(place if place.is_dir() else place.absolute().parent)
    if number == errno.ENOENT and named.resolve().parent.is_dir():
        return False  # a write would have made it
    file, whole = named.absolute(), place.absolute()
    return file.is_relative_to(whole) or whole.is_relative_to(file) or _is_draft(file, whole)


def full_disk(error: Exception, place: Path | str | None = None) -> WriteError | None:
    """Return the line for a disk that is full or read-only; None for any other error."""
    failed = write_error(error, place)
    return failed if failed and failed.errno in DISK else None


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raise WriteError where the body cannot write `place`, or what is below it."""
    try:
        yield
    except Exception as error:  # tokenizers raises just this
        if isinstance(error, WriteError) or (failed := write_error(error, place)) is None:
            raise
        raise failed from error


def draft_of(file: Path) -> Path:
    """Where this process writes `file`, or a folder, before it moves it there whole."""
    return file.with_name(f".{file.name}.{os.getpid()}")


def write_text(file: Path, text: str, private: bool = False) -> None:
    """Write a run's own file whole or not at all. `private`: only the user may read it. Raises WriteError."""
    draft = draft_of(file)
    with writing(file), removed_on_failure(draft):
        with open(draft, "w", encoding="utf-8", opener=open_private) as made:
            if private:
                os.fchmod(made.fileno(), 0o600)
            made.write(text)
        draft.replace(file)


@contextmanager
def removed_on_failure(draft: Path) -> Iterator[None]:
    """Remove `draft`, a file or a folder, if the body fails: on a full disk it would hold what room there is."""
    try:
        yield
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):
            draft.unlink()
        raise
