"""The bounds of every number, text and list in a message of either wire, as types for the fields of its model.

A value beyond its bound is refused on arrival (`message.validate`). Texts that explain something to people are cut
instead: a long explanation must not end the process that gives it. Bytes are bounded by the size of the message.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, FiniteFloat

from buffer.data.servable import MOST_ENTRIES, MOST_KEYS

T = TypeVar("T")
NAME, TEXT_LENGTH, REPORT = 200, 4000, 100_000
"""Characters of a name, of a text for people and of a report of many lines."""
MOST_RANKS = 2**16
"""A batch is not cut for more: the cut takes memory for each."""
MOST_WORKERS = 4096
"""Workers of one rollout server."""
MOST_NAMED = 2**14
"""Servers, sets or figures in one message."""
MOST_HELD = 2**16
"""Leases that one server holds, and samples of a group."""
MOST_STATS = 256
"""Figures in a heartbeat: every answer to `Status` repeats them for each server."""
MOST_RESULTS = 2**18
"""Evaluations of a run."""


def written(text: Any) -> Any:
    """`text` with half surrogate pairs, which UTF-8 cannot hold, as escapes; anything else as it is.

    Example: `written("a\\ud83d")` is a, a backslash and ud83d.
    """
    return text.encode("utf-8", "backslashreplace").decode() if isinstance(text, str) else text


def cut(text: Any, most: int = TEXT_LENGTH) -> Any:
    """`text` as `written`, without what is beyond `most` characters; anything else as it is.

    Example: `cut("abcdef", 4)` -> `"a..."`
    """
    return f"{text[: most - 3]}..." if isinstance(text := written(text), str) and len(text) > most else text


Count = Annotated[int, Field(ge=0, lt=2**62)]
VersionOrNone = Annotated[int, Field(ge=-1, lt=2**62)]
"""A version, or -1 for none."""
Checksum = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Measured = FiniteFloat
Flag = Annotated[str, Field(max_length=32)]
"""The name of a backend or a kind."""
Name = Annotated[str, Field(max_length=NAME)]
"""The name of a process, a set or a figure; a token or a digest."""
LongName = Annotated[str, Field(max_length=TEXT_LENGTH)]
"""A path, an address, or a tensor's name."""
Text = Annotated[str, BeforeValidator(cut), Field(max_length=TEXT_LENGTH)]
"""For people, cut to its length."""
Report = Annotated[str, BeforeValidator(lambda text: cut(text, REPORT)), Field(max_length=REPORT)]
"""For people, several lines, cut to its length."""
Label = Annotated[str, BeforeValidator(written), Field(max_length=2**20)]
"""A text that users' code chose and the buffer repeats in an answer, as the name of a metric."""
Row = Annotated[dict[str, Any], Field(max_length=MOST_KEYS)]
"""A row of a data set. The size of the message bounds its values."""
Few = Annotated[list[T], Field(max_length=MOST_NAMED)]
Held = Annotated[list[T], Field(max_length=MOST_HELD)]
Known = Annotated[list[T], Field(max_length=MOST_RESULTS)]
Many = Annotated[list[T], Field(max_length=MOST_ENTRIES)]
"""Samples of a batch, tokens or tensors."""
Stats = Annotated[dict[Name, Measured], Field(max_length=MOST_STATS)]
Figures = Annotated[dict[Label, Measured], Field(max_length=MOST_NAMED)]
ByName = Annotated[dict[Name, T], Field(max_length=MOST_NAMED)]
ByLabel = Annotated[dict[Label, T], Field(max_length=MOST_KEYS)]
