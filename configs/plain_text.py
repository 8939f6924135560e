"""Makes text of users, policies and peers safe to show in a terminal, a log or a page. Text may hold any character
until it passes through `visible`, just before it leaves the process (a test refuses `print`)."""

import json
import logging
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast
from urllib.parse import quote

from configs.own_packages import named_as_called

UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, except tab and line feed; escape sequences begin with one
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of nearby text
    "\u2028\u2029\ufeff\ufff9-\ufffb\U000e0000-\U000e007f\U000e0100-\U000e01ef"  # line breaks, invisible marks, tags
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b\u2060-\u2065\u206a-\u206f\u3164\uffa0"  # nothing to see, no join
    "\ud800-\udfff]"  # lone surrogates, which no encoding can hold
)
COLOUR = re.compile("\x1b\\[[0-9;:]*m")
FURTHER = re.compile("\n(?!Traceback [(]most recent call last[)]:\n)")
USER_OF_URL = re.compile(r"(?<=://)[^\s/@:\"']*:[^\s/@\"']+(?=@)")
_GIVEN: dict[str, str] = {}
_CONCEALED: dict[str, str] = {}
_LOST: deque[OSError] = deque(maxlen=1)
_SECRETS: list[re.Pattern[str]] = []
MOST_CHARS = 4000
MOST_LOGGED = 1 << 15
MOST_PRINTED = 1 << 22
MOST_DIGITS = 14


def conceal(table: Mapping[str, str]) -> None:
    """Show each text of `table` as its value from now on."""
    new = {secret: shown for secret, shown in table.items() if secret not in _GIVEN}
    _GIVEN.update(new)
    for secret, shown in new.items():
        for form in {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret), quote(secret, safe="")}:
            _CONCEALED.setdefault(form, shown)
    if new:
        longest_first = sorted(_CONCEALED, key=len, reverse=True)
        _SECRETS[:] = [re.compile("|".join(map(re.escape, longest_first)))]


def concealed() -> dict[str, str]:
    """What `conceal` was given, without the forms that it made: for another process, or for this one again."""
    return dict(_GIVEN)


def without_credentials(text: str) -> str:
    """Remove what `conceal` was given, and users and passwords in URLs."""
    for secrets in _SECRETS:
        text = secrets.sub(lambda found: _CONCEALED[found[0]], text)
    return USER_OF_URL.sub("***", text) if "://" in text else text


def visible(text: str, most: int = MOST_CHARS) -> str:
    """Write control characters as numbers, `"a\\x1b[2J"` -> `"a\\\\u001b[2J"`, but keep tabs and line feeds.

    Credentials are replaced. Commands have the names by which the user called this one.
    """
    text = named_as_called(without_credentials(text))
    return folded(UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", folded(text, 2 * most)), most)


def visible_line(text: str, most: int = MOST_CHARS) -> str:
    """As `visible`, for a text that must not begin another line."""
    return visible(text, most).replace("\n", "\\u000a")


def visible_lines(text: str) -> str:
    """Indent further lines, so that none looks like another message."""
    first, *others = visible(text).splitlines() or [""]
    return "\n".join([first, *(f"  {line.strip()}" for line in others)])


def print_visible(
    text: object = "", stream: TextIO | None = None, end: str = "\n", most: int = MOST_PRINTED, ends: bool = False
) -> None:
    """Print visibly. `ends`: the command ends with its reader, by BrokenPipeError."""
    stream = sys.stdout if stream is None else stream
    try:
        print(visible(str(text), most), end=end, file=stream)
        stream.flush()
    except BrokenPipeError:
        if ends:
            raise
    except OSError as error:  # the end of the process reports it (`entrypoint.py`)
        _LOST.append(error)


def output(reported: bool = True) -> IO[str]:
    """Stdout for rich, whose prints raise where the disk is full or the terminal is gone.

    The command's end reports the loss if `reported`. A reader that has left raises BrokenPipeError.
    """
    return cast(IO[str], _Output(reported))


class _Output:
    def __init__(self, reported: bool) -> None:
        self._stream, self._reported = sys.stdout, reported

    def write(self, text: str) -> int:
        with self._losing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._losing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._reported:
                _LOST.append(error)


def lost_output() -> OSError | None:
    return next(iter(_LOST), None)


def colourless(text: str) -> str:
    return COLOUR.sub("", text)


def folded(text: str, most: int) -> str:
    """Shorten `text` to `most` characters: a note replaces its middle."""
    if len(text) <= most:
        return text
    said = f" [... {len(text) - most:,} or more characters left out ...] "
    kept = max(most - len(said), 0)
    return (text[: kept - kept // 3] + said + text[len(text) - kept // 3 :])[:most]


def all_visible(data: Any, most: int = MOST_CHARS) -> Any:
    if isinstance(data, str):
        return visible(data, most)
    if isinstance(data, dict):
        return {all_visible(key, most): all_visible(value, most) for key, value in data.items()}
    return [all_visible(one, most) for one in data] if isinstance(data, list | tuple) else data


def figure(value: float, form: str) -> str:
    """`1e+41` for a number that is too wide."""
    text = format(value, form)
    return text if len(text) <= MOST_DIGITS else format(value, ".3g")


class PlainFormatter(logging.Formatter):
    """Indents further lines, so that none looks like another record."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(FURTHER.sub("\n  ", super().format(record).rstrip("\n")), MOST_LOGGED)
