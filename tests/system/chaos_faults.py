"""Faults of the chaos test that kill nothing: a small disk of the run's own that fills, and wall clocks that jump.

Used by `chaos.py`. The disk is a tmpfs, which takes the right to mount (`why_no_disk`). A clock is a file that
`tests/harness/wall_clock/sitecustomize.py` reads in the processes.
"""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.harness.toy import ROOT

KINDS = ("kill", "stop", "disk", "clock")
"""Faults that `--faults` chooses from."""
DISK_MIB = 64
"""More than the ledger of a run with 50 kills takes, the log of SQLite and the space allocated ahead included."""
WALL_CLOCK = ROOT / "tests" / "harness" / "wall_clock"
JUMP_S = 3600


def mount(mib: int) -> list[str]:
    """The command, but for the folder."""
    return ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "headrace"]


def why_no_disk() -> str:
    """Why this process may not mount a disk, in one line; empty if it may. Tried in a namespace of its own."""
    trial = ["unshare", "--mount", *mount(DISK_MIB), "/mnt"]
    if missing := [program for program in ("unshare", "mount") if shutil.which(program) is None]:
        return f"no program {missing[0]}"
    done = subprocess.run(trial, capture_output=True, text=True)
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return f"{said}; it takes root with CAP_SYS_ADMIN" if done.returncode else ""


class Disk:
    """The small file system at `folder`."""

    def __init__(self, folder: Path, mib: int = DISK_MIB) -> None:
        self.folder, self.mib = folder, mib
        self._ballast = folder / "ballast"

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """While the block runs. Afterwards `folder` is an ordinary one with the same files."""
        self.folder.mkdir()
        subprocess.run([*mount(self.mib), str(self.folder)], check=True)
        copy = self.folder.with_name(f"{self.folder.name}-copy")
        try:
            yield
        finally:
            self.free()
            shutil.copytree(self.folder, copy)
            subprocess.run(["umount", str(self.folder)], check=True)
            self.folder.rmdir()
            copy.rename(self.folder)

    def fill(self) -> None:
        """Take all the space that there is."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(2**16))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """Give back what `fill` has taken."""
        self._ballast.unlink(missing_ok=True)


def clocked(environment: dict[str, str], clock: Path) -> dict[str, str]:
    """`environment` for a process, and the processes that it starts, whose wall clock is the file `clock`."""
    paths = [str(WALL_CLOCK), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths), "WALL_CLOCK": str(clock)}


def jump(clock: Path, by_s: int) -> None:
    """Move a wall clock; an offset is replaced whole, so that no process reads half of it."""
    off_s = int(clock.read_text()) if clock.exists() else 0
    draft = clock.with_name(f"{clock.name}.draft")
    draft.write_text(str(off_s + by_s))
    draft.replace(clock)


def chosen(names: str) -> Sequence[str]:
    """Faults of a comma-separated list. Raises ValueError for a name that is none."""
    faults = tuple(names.split(","))
    if unknown := [name for name in faults if name not in KINDS]:
        raise ValueError(f"{unknown[0]!r} is no fault; choose from {','.join(KINDS)}")
    return faults
