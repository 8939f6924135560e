"""`python -m buffer quarantine RUN`: the groups that could not be trained, why, and what their samples say."""

import sqlite3
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from buffer.ledger.types import server_name
from buffer.wire.sample import Sample

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT_CHARS = 200
ITEMS = """
SELECT item, row, epoch, version, server, batch, reason, changed_at FROM items WHERE state = 'quarantined' ORDER BY item
"""
SAMPLES = "SELECT idx, bytes, data_of(segment, position, bytes) FROM samples WHERE item = ? ORDER BY idx"


def quarantine(db: sqlite3.Connection, tokenizer: "Tokenizer | None" = None) -> Iterable[str]:
    items = db.execute(ITEMS).fetchall()
    if not items:
        yield "no group is in quarantine"
    for item, row, epoch, version, server, batch, reason, at in items:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
        yield f"item {item}, row {row} of data.train, epoch {epoch}: {reason}"
        yield f"    dispatched at version {version} to {server_name(server)}; out of batch {batch} at {when}"
        for index, size, data in db.execute(SAMPLES, [item]):
            yield f"    sample {index}, {size:,} bytes: {_described(data, tokenizer)}"


def _described(data: bytes | None, tokenizer: "Tokenizer | None") -> str:
    if data is None:
        return "its bytes are gone"
    try:
        sample = Sample.unpack(data)
    except ValueError as error:
        return f"its bytes are no sample: {' '.join(str(error).split())[:TEXT_CHARS]}"
    tokens = sample.tokens.numpy()
    known = tokens[tokens >= 0].tolist()
    text = tokenizer.decode(known, skip_special_tokens=False) if tokenizer else sample.answer
    shown = text if len(text) <= TEXT_CHARS else f"...{text[-TEXT_CHARS:]}"
    return f"reward {sample.reward:g}, {sample.finish}, {len(tokens)} tokens: {shown!r}"
