"""Keeps a user's `configs` or `buffer` from taking the place of Headrace's packages.

`python -m actors` searches the current folder first. So the command `headrace` runs Python with `-P`, which leaves that
folder out, and imports the five packages from the folder of this one (PIN): once imported, they are found whatever
`sys.path` holds.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = ("actors", "buffer", "configs", "learner", "rollout")
ROOT = str(Path(__file__).absolute().parents[1])
ENTRY = str(Path(ROOT) / "headrace" / "__main__.py")
PIN = f"import sys; sys.path.insert(0, {ROOT!r}); import {', '.join(PACKAGES)}; del sys.path[0]"
CALLED = re.compile(rf"\bpython -m (actors (?!COMMAND)|(?:{'|'.join(PACKAGES)})\b)")
SHORT = re.compile(
    r"\bheadrace (?:buffer (?=(?:tail|show|export|problems|quarantine|scrub)\b)"
    r"|rollout (?=evaluate\b)|learner (?=(?:merge|sft)\b))"
)


def is_front() -> bool:
    """Whether the current folder is not searched for modules."""
    return sys.flags.safe_path


def command(module: str, *words: str) -> tuple[str, ...]:
    if is_front():
        return (sys.executable, "-P", ENTRY, module, *words)
    return (sys.executable, "-m", module, *words)


def of_this_machine(argv: Iterable[str]) -> tuple[str, ...]:
    """ENTRY has another path on another machine."""
    ending = os.sep + os.path.join("headrace", "__main__.py")
    return tuple(ENTRY if word.endswith(ending) else word for word in argv)


def named_as_called(text: str) -> str:
    """`python -m actors status` -> `headrace status`"""
    if not is_front() or "python -m" not in text:
        return text
    named = CALLED.sub(lambda found: "headrace " + ("" if found[1] == "actors " else found[1]), text)
    return SHORT.sub("headrace ", named)


def shadows(folders: Iterable[str | Path]) -> Iterator[Path]:
    """Yield packages and modules that hide one of PACKAGES."""
    for folder in dict.fromkeys(os.path.abspath(folder) for folder in folders):
        for name in () if is_headrace(folder) else PACKAGES:
            if place := place_of(folder, name):
                yield place


def place_of(folder: str | Path, name: str) -> Path | None:
    """`NAME.py`, or the folder NAME with Python files, in `folder`; None if there is neither."""
    inner, file = Path(folder, name), Path(folder, f"{name}.py")
    if (inner / "__init__.py").is_file():
        return inner
    if file.is_file():
        return file
    return inner if inner.is_dir() and any(inner.glob("*.py")) else None


def is_headrace(folder: str | Path) -> bool:
    """Whether Headrace, or another copy of it, is in `folder`."""
    return Path(folder, "configs", Path(__file__).name).is_file()
