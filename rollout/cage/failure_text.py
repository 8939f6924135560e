"""Describes failures: one bounded line, and the traceback of users' frames."""

import traceback
from typing import Any

from configs.user_file import PREFIX

TRACEBACK_CHARS = 16 * 2**10
REASON_CHARS = 500


class ToldError(Exception):
    """A failure described by another process."""

    def __init__(self, origin: str, reason: str, trace: str = "", permanent: bool = False) -> None:
        super().__init__(reason)
        self.origin, self.reason, self.trace, self.permanent = origin, reason, trace, permanent


def describe_error(name: str, error: BaseException) -> tuple[str, str, str]:
    """Return origin, reason and traceback of what the function `name` raised."""
    if isinstance(error, ToldError):
        return error.origin, one_line(error.reason), error.trace
    if isinstance(error, SystemExit):
        how = f"{name} called sys.exit({_text(error.code, repr)})"
    elif is_ours(error):
        how = _text(error)
    else:
        how = f"{name} raised {exception_text(error)}"
    return type(error).__name__, one_line(how), user_frames(error)


def is_ours(error: BaseException) -> bool:
    module = type(error).__module__
    return module.startswith("rollout.") and not module.startswith(PREFIX)


def describe_load_error(name: str, error: BaseException) -> tuple[str, str]:
    """Return reason and traceback; a loader's ValueError needs no prefix."""
    how = _text(error) if type(error) is ValueError else f"{name} cannot be loaded: {exception_text(error)}"
    return one_line(how), user_frames(error)


def exception_text(error: BaseException) -> str:
    text = _text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(value: object, how: Any = str) -> str:
    try:
        return str(how(value))
    except BaseException:  # a user's own class, with an error in __str__
        return f"<{type(value).__name__} whose text cannot be made>"


def one_line(text: str) -> str:
    """Bound the text to one line that any encoding can carry."""
    line = " ".join(text[: 4 * REASON_CHARS].split())
    line = line if len(line) <= REASON_CHARS else line[: REASON_CHARS - 4] + " ..."
    return line.encode(errors="backslashreplace").decode()


def user_frames(error: BaseException) -> str:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("rollout.cage."):
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except BaseException:
        text = exception_text(error)
    if len(text) > TRACEBACK_CHARS:
        text = f"{text[: TRACEBACK_CHARS // 2]}\n...\n{text[-TRACEBACK_CHARS // 2 :]}"
    return text.encode(errors="backslashreplace").decode()
