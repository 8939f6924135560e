"""`python -m buffer.data.entries`: makes and scores entries of reasoning-gym; the child of an `EntryMaker`.

Some sets take a second for an entry, which must not stop the buffer. Some make other entries under another hash seed,
or draw from Python's global random numbers: the parent sets PYTHONHASHSEED, and the global seed is set before each
entry.
"""

import copy
import dataclasses
import difflib
import hashlib
import importlib
import json
import os
import queue
import random
import signal
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from configs.inner_command import inner_words

ENTRY_S = 30
"""For one entry, or one score."""


class RequestError(ValueError):
    """A request that cannot be answered; one line."""

    pass


class TakesTooLong(BaseException):
    """No Exception, which a set's own code may catch."""


@lru_cache(maxsize=64)
def data_set(name: str, config: str) -> Any:
    """`config`: JSON."""
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else "see `python -c 'import reasoning_gym.factory as f; print(*f.DATASETS)'`"
        )
        raise RequestError(f"reasoning-gym {version('reasoning-gym')} has no set {name}; {hint}")
    values = json.loads(config)
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    if unknown := sorted(set(values) - set(known)):
        raise RequestError(f"{name} has no {unknown[0]}; it has {', '.join(known)}")
    try:
        return create_dataset(name, **values)
    except Exception as error:  # a set checks its config in its own way
        raise RequestError(f"{name} refuses its config: {type(error).__name__}: {error}") from None


@lru_cache(maxsize=256)
def entry(name: str, config: str, index: int) -> dict[str, Any]:
    made = data_set(name, config)
    random.seed(index)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(index)
    try:
        found: dict[str, Any] = made[index]
    except Exception as error:  # a set's own code
        raise RequestError(f"{name} cannot make entry {index}: {type(error).__name__}: {error}") from None
    return found


def about(name: str, config: str) -> dict[str, Any]:
    """The package's version decides what entries are."""
    return {"version": version("reasoning-gym")} | row(name, config, 0)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def row(name: str, config: str, index: int) -> dict[str, Any]:
    made = entry(name, config, index)
    question, answer = str(made["question"]), made.get("answer")
    return {"question": question, "sha256": sha256(question)} | ({"answer": answer} if isinstance(answer, str) else {})


def score(name: str, config: str, index: int, question: str, text: str, longest_s: float = ENTRY_S) -> dict[str, Any]:
    """Score an answer with the set's own code.

    If that raises, the answer counts as empty. Beyond `longest_s` of processor time, SIGPROF ends this process. Raises
    RequestError if the entry's question is another.
    """
    from reasoning_gym.utils import extract_answer

    made = entry(name, config, index)
    if sha256(made["question"]) != question:
        here = f"with reasoning-gym {version('reasoning-gym')} entry {index} of {name} is another than in the row"
        raise RequestError(f"{here}; install the version that made the rows")
    of_set, answer = data_set(name, config).score_answer, None
    signal.setitimer(signal.ITIMER_PROF, longest_s)
    try:
        answer = extract_answer(text)
        reward = float(of_set(answer, copy.deepcopy(made)))
    except Exception:  # some sets parse without care: the policy's fault, not the run's
        reward, answer = float(of_set(None, copy.deepcopy(made))), None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"score": reward, "formed": float(answer is not None)}


def start() -> dict[str, Any]:
    """The import takes a second."""
    importlib.import_module("reasoning_gym.factory")
    return {}


VERBS: dict[str, Callable[..., dict[str, Any]]] = {"start": start, "about": about, "row": row, "score": score}


def answered(verb: str, arguments: list[Any]) -> dict[str, Any]:
    """Return the answer, or the error as `{"error": ...}`."""
    signal.alarm(ENTRY_S)
    try:
        return VERBS[verb](*arguments)
    except TakesTooLong:
        return {"error": f"{' '.join(map(str, [verb, *arguments[:3]]))} took longer than {ENTRY_S} s"}
    except Exception as error:  # the outermost boundary of a request: a set's code may raise anything
        who = "" if isinstance(error, RequestError) else f"{verb} {arguments[:1]}: {type(error).__name__}: "
        return {"error": " ".join(f"{who}{error}".split())[:500]}
    finally:
        signal.alarm(0)


def late(number: int, frame: object) -> None:
    raise TakesTooLong


def main() -> None:
    """Answer requests until stdin ends, those ahead of their need last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole terminal: the parent decides
    signal.signal(signal.SIGALRM, late)
    asked: queue.PriorityQueue[list[Any]] = queue.PriorityQueue()
    threading.Thread(target=listen, args=[asked], daemon=True).start()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some sets print
        while True:
            _, number, verb, arguments = asked.get()
            answers.write(json.dumps([number, answered(verb, arguments)]) + "\n")
            answers.flush()


def listen(asked: "queue.PriorityQueue[list[Any]]") -> None:
    """The parent must not wait for the pipe."""
    for line in sys.stdin:
        asked.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    inner_words()
    main()
