"""What can go wrong with an attempt at an item. An EpisodeError is reported to the buffer; EngineDead ends the
server."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reward workers import this file, and start faster without NumPy
    from buffer.wire.protocol import FailureKind


class EpisodeError(Exception):
    """An attempt at an item failed. Tasks may raise it, and the item is tried again.

    `permanent`: no other attempt can succeed. `returned`: the item was not at fault, and it counts as no attempt.
    `origin`: the type of the exception behind it.
    """

    kind: "FailureKind" = "task"
    permanent = False
    returned = False
    origin = ""

    def __init__(self, reason: str, permanent: bool = False, origin: str = "") -> None:
        super().__init__(reason)
        self.permanent, self.origin = permanent, origin or type(self).__name__


class PromptError(EpisodeError):
    """A row of the data set cannot become a prompt."""

    kind = "prompt"

    def __init__(self, reason: str) -> None:
        super().__init__(reason, permanent=True)


class RewardError(EpisodeError):
    """An answer could not be scored. Its group fails; it never gets a reward of 0 instead.

    `temporary`: a server could not answer, and may later.
    """

    kind = "reward"
    temporary = False


class TeacherError(EpisodeError):
    """A teacher gave no log-probabilities of a group. The group fails; no token gets a 0 instead.

    An answer that cannot be used counts against the run, which is given up if there are only such answers. A server
    that could not answer does not.
    """

    def __init__(self, reason: str, temporary: bool = False, origin: str = "") -> None:
        super().__init__(reason, origin=origin)
        self.kind = "infrastructure" if temporary else "engine"


class TruthError(ValueError):
    """The reward cannot use the row's ground truth, whatever the answer."""

    permanent = True


class EngineError(EpisodeError, RuntimeError):
    """A call to vLLM failed, and vLLM lives on."""

    kind = "engine"


class ChatRefused(ValueError):
    """A call of `chat` that cannot be taken as asked. The episode may go on, or end and be scored.

    `code` is OpenAI's where there is one: `invalid_request_error`; a limit of the run, after which the episode counts
    as truncated: `context_length_exceeded`, `turns_exceeded`, `time_exceeded`; `episode_ended`.
    """

    def __init__(self, reason: str, code: str = "invalid_request_error") -> None:
        super().__init__(reason)
        self.code = code


class EngineDead(RuntimeError):
    """vLLM's process died, does not answer, or returns what cannot be. Only the end of the server helps."""


def all_errors(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in it that are no groups, in order."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from all_errors(one)
    else:
        yield error


def first_error(error: BaseException) -> BaseException:
    """The first exception that is no group."""
    return next(all_errors(error))
