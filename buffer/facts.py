"""From a packed sample to what the ledger needs of it: each sample is opened once in the buffer, here, when it arrives.

`Sample` of `buffer/protocol.py` says what a sample is, and in words what is wrong with one. Its validation takes half
of the buffer's time at full load, so samples just as `Sample.pack` writes them are known by a quicker look; whatever
that does not know goes through `Sample`. Pure; used by `buffer/answers.py`.
"""

from math import isfinite
from typing import Any

import numpy as np
from pydantic import ValidationError

from buffer.protocol import Sample, in_words, open_map
from buffer.records import Facts

FIELDS = {*Sample.model_fields}
ARRAYS = [(name, dtype, np.dtype(dtype).itemsize) for name, dtype in Sample.DTYPES.items()]


def facts_of(data: bytes) -> Facts:
    """Raises ValueError, in one line, for what is not a sample, or has a sampled token of no policy version."""
    fields = open_map(data)
    if not _usual(fields):
        sample = _sample(fields)
        fields = sample.model_dump() | {"sampled": {"data": sample.sampled.numpy().astype(bool).tobytes()}}
    sampled = np.frombuffer(fields["sampled"]["data"], bool)
    oldest = int(np.frombuffer(fields["versions"]["data"], "<i4")[sampled].min())
    if oldest < 0:
        raise ValueError("a sampled token without the policy version that sampled it")
    cut = fields["finish"] == "length"
    return Facts(sampled.size, int(np.count_nonzero(sampled)), float(fields["reward"]), cut, oldest)


def _sample(fields: dict[str, Any]) -> Sample:
    try:
        return Sample.model_validate(fields)
    except ValidationError as error:
        raise ValueError(f"Put.samples: {in_words(error)}") from None


def _usual(fields: dict[str, Any]) -> bool:
    """Whether this is what `Sample.pack` makes, type for type. False proves nothing."""
    if fields.keys() != FIELDS or type(fields["tokens"]) is not dict:
        return False
    shape = fields["tokens"].get("shape")
    if type(shape) is not list or [type(size) for size in shape] != [int] or shape[0] < 0:
        return False
    for name, dtype, size in ARRAYS:
        array = fields[name]
        if type(array) is not dict or len(array) != 3 or array.get("dtype") != dtype:
            return False
        data, its = array.get("data"), array.get("shape")
        if type(data) is not bytes or len(data) != shape[0] * size or its != shape or type(its[0]) is not int:
            return False
    flags: bytes = fields["sampled"]["data"]
    if not flags.count(1) or flags.count(1) + flags.count(0) != shape[0]:
        return False
    metrics, reward = fields["metrics"], fields["reward"]
    return (
        type(reward) is float
        and isfinite(reward)
        and fields["finish"] in ("stop", "length")
        and type(fields["answer"]) is str
        and type(metrics) is dict
        and all(type(name) is str and type(value) is float for name, value in metrics.items())
    )
