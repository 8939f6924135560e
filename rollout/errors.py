"""What can go wrong with an attempt at an item."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reward workers start faster without NumPy
    from buffer.wire.protocol import FailureKind


class EpisodeError(Exception):
    """An attempt at an item failed and is tried again. Tasks may raise it.

    `permanent`: no attempt can succeed. `returned`: the item was not at fault. `origin`: the underlying exception's
    type.
    """

    kind: "FailureKind" = "task"
    permanent = False
    returned = False
    origin = ""

    def __init__(self, reason: str, permanent: bool = False, origin: str = "") -> None:
        super().__init__(reason)
        self.permanent, self.origin = permanent, origin or type(self).__name__


class PromptError(EpisodeError):
    """A row cannot become a prompt."""

    kind = "prompt"

    def __init__(self, reason: str) -> None:
        super().__init__(reason, permanent=True)


class RewardError(EpisodeError):
    """An answer could not be scored. Its group fails; it never gets a reward of 0.

    `temporary`: a server may answer later.
    """

    kind = "reward"
    temporary = False


class TeacherError(EpisodeError):
    """A teacher gave no log-probabilities. The group fails; no token gets a 0."""

    def __init__(self, reason: str, temporary: bool = False, origin: str = "") -> None:
        super().__init__(reason, origin=origin)
        self.kind = "infrastructure" if temporary else "engine"


class TruthError(ValueError):
    """The reward cannot use the row's ground truth."""

    permanent = True


class EngineError(EpisodeError, RuntimeError):
    """A call to vLLM failed, and vLLM lives on."""

    kind = "engine"


class ChatRefused(ValueError):
    """A call of `chat` was refused; the episode may go on.

    `code`: mostly OpenAI's. `context_length_exceeded`, `turns_exceeded` and `time_exceeded` truncate the episode.
    """

    def __init__(self, reason: str, code: str = "invalid_request_error") -> None:
        super().__init__(reason)
        self.code = code


class EngineDead(RuntimeError):
    """vLLM died, does not answer, or returned impossible values: the server ends."""


def all_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that are no groups, in order."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from all_errors(one)
    else:
        yield error


def first_error(error: BaseException) -> BaseException:
    return next(all_errors(error))
