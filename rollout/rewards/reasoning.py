"""The reward of reasoning-gym's rows: the score that the set itself gives.

The entry is made again from name, config and index, because what a set scores by need not survive MessagePack.
"""

import json
import signal
from typing import Any

from buffer.data.entry_maker import MakerEnded, entry_maker
from configs.plain_text import print_visible
from rollout.errors import TruthError
from rollout.rewards.answer_judge import GAVE_UP, LIMITS, TRIES


def start() -> None:
    """Raises ValueError."""
    entry_maker().ask("start").result()


def compute_score(solution_str: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """Score the last `<answer>`.

    Without one, or if the set's code raises, `formed` is 0. An answer that takes too long, or crashes its reader, gets
    the metric `gave_up`. Raises EntryError, TruthError.
    """
    entry = extra_info.get("reasoning_gym") if isinstance(extra_info, dict) else None
    if not isinstance(entry, dict) or not {"name", "config", "index", "question_sha256"} <= entry.keys():
        raise TruthError("the row does not come from reasoning-gym: its extra_info.reasoning_gym names no entry")
    named = entry["name"], json.dumps(entry["config"], sort_keys=True), entry["index"], entry["question_sha256"]
    for _ in range(TRIES):
        try:
            return _score(*named, solution_str) | {GAVE_UP: 0.0}
        except MakerEnded as error:
            print_visible(f"gave up on an answer: {error}")
            if error.code == -signal.SIGPROF:
                break
    return _score(*named, "") | {GAVE_UP: 1.0}


def _score(*asked: Any) -> dict[str, float]:
    score: dict[str, float] = entry_maker().ask("score", *asked, LIMITS.processor_s).result()
    return score
