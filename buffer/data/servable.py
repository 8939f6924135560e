"""Whether a row can be stored, sent, and read by a rollout server; checked before any row is dispatched."""

from collections.abc import Iterator
from typing import Any

import msgpack

MOST_KEYS, MOST_ENTRIES = 2**16, 2**20
MOST_NESTED = 100
"""Python and its libraries fail between 250 and 1,000 levels."""
MOST_BYTES = 64 * 2**20
SHOWN = 60
NESTING = (dict, list)


def unservable(row: dict[str, Any]) -> str:
    """Why not, or "". `row` has the types of `columns.plain`."""
    if is_deep(row):
        return f"it is nested more than {MOST_NESTED} levels deep"
    try:
        size = len(msgpack.packb(row))
    except (ValueError, TypeError, OverflowError) as error:
        return next(_faults(row, ""), str(error))
    if size > MOST_BYTES:
        return f"it takes {size / 2**20:,.0f} MiB, more than {MOST_BYTES // 2**20}"
    return next(_faults(row, ""), "") if size > MOST_KEYS else ""  # a smaller row cannot have so many


def is_deep(value: Any, levels: int = MOST_NESTED) -> bool:
    """Without recursion."""
    level = [value]
    for _ in range(levels + 1):
        inside = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, NESTING)]
        if not inside:
            return False
        level = [part for parts in inside for part in parts]
    return True


def _faults(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, dict):
        if len(value) > MOST_KEYS:
            yield f"{where or 'it'} has {len(value):,} keys, more than {MOST_KEYS:,}"
        for key, part in value.items():
            yield from _faults(key, f"a key of {where or 'the row'}")
            yield from _faults(part, f"{where}.{_short(key)}" if where else _short(key))
    elif isinstance(value, list):
        if len(value) > MOST_ENTRIES:
            yield f"{where} has {len(value):,} entries, more than {MOST_ENTRIES:,}"
        for number, part in enumerate(value):
            yield from _faults(part, f"{where}[{number}]")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"{value[error.start]!a} at character {error.start}"
            yield f"{where} has half a surrogate pair, {half}, which is not valid text"
    elif value is not None and not isinstance(value, bool | int | float | bytes):
        yield f"{where} is a {type(value).__name__}, which is neither text nor a number"


def _short(key: object) -> str:
    return str(key).encode(errors="backslashreplace").decode()[:SHOWN]
