"""The reward of rows of reasoning-gym: the score that the set itself gives.

Called in a reward worker. The entry is made again, from its set's name, config and index in the row, because what a set
scores by need not survive a message: after MessagePack a tuple is a list. That happens in a process of its own
(`buffer/data/entry_maker.py`), for which a call waits.
"""

import json
from typing import Any

from buffer.data.entry_maker import entry_maker


def start() -> None:
    """Start the process that scores, while a worker has time for it: not in the first call. Raises ValueError."""
    entry_maker().ask("start").result()


def compute_score(solution_str: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """The set's score of the text in the last `<answer>`, as reasoning-gym reads it; without one, or with one at which
    the set's own code raises, its score of no answer, and `formed` is 0.

    Raises EntryError if the entry is another than the row's, and KeyError for a row of another source.
    """
    entry = extra_info["reasoning_gym"]
    named = entry["name"], json.dumps(entry["config"], sort_keys=True), entry["index"], entry["question_sha256"]
    score: dict[str, float] = entry_maker().ask("score", *named, solution_str).result()
    return score
