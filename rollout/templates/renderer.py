"""Renders Jinja templates of users and models in a process that can be killed.

The process is kept: rendering a row takes 0.1 ms, starting a process 0.1 s.
"""

import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import msgpack

from configs.own_packages import PIN
from rollout.cage.frames import BAD_BYTES, MAX_BYTES, plain, unpacker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROCESSOR_S = 2.0
WALL_S = 20.0
"""A process silent for so long was stopped, or the machine is overloaded."""
TRIES = 2
"""The first process may have been killed or stopped from outside: no fault of the template."""
MEMORY = 2**30
"""Bytes of address space."""
MOST_CHARACTERS = 4 * 2**20
"""A prompt of a million tokens has so many."""
PROGRAM = f"""import sys
sys.path[:] = sys.argv[5:]
{PIN}
from rollout.templates.template_process import serve
serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if sys.argv[4] else None)"""
CHANGED = "the chat template changes its last message, so no answer can continue it"
CONTINUED = "Zq7ContinuedHereZq7 "
"""Marks the end of a message that the answer continues. Its space shows whether the template removes spaces."""


class RenderError(Exception):
    """A template gave no text. `kind`: `syntax`, `undefined`, `refused`, `raised` or `limit`."""

    def __init__(self, kind: str, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.kind, self.line = kind, line

    def about(self, what: str, template: str, place: str = "") -> str:
        reason = " ".join(str(self).split())
        if self.kind == "limit":
            return f"{template}{place and f' ({place})'} {reason} for {what}"
        return f"{template} {'fails on' if self.kind == 'raised' else 'refuses'} {what}: {reason}"


class Renderer:
    """A process for templates, started when needed. Threads take turns. `now`: the local time that templates write, in
    seconds as if it were UTC; None: that of the clock."""

    def __init__(
        self,
        processor_s: float = PROCESSOR_S,
        memory: int = MEMORY,
        most: int = MOST_CHARACTERS,
        wall_s: float = WALL_S,
        now: int | None = None,
    ) -> None:
        self._limits, self._most, self._wall_s, self._now = (processor_s, memory), most, wall_s, now
        self._lock = threading.Lock()
        self._process: TemplateProcess | None = None

    def check(self, kind: str, source: str) -> None:
        """Compile only. Raises RenderError."""
        self._ask(kind, source, None)

    def render(self, kind: str, source: str, names: Mapping[str, Any]) -> str:
        """`kind` is a key of ENVIRONMENTS. Raises RenderError."""
        return self._ask(kind, source, names)

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.close()
                self._process = None

    def _ask(self, kind: str, source: str, names: Mapping[str, Any] | None) -> str:
        try:
            request = msgpack.packb([kind, source, names, self._most], default=plain, unicode_errors="surrogatepass")
        except (TypeError, ValueError, OverflowError) as error:
            raise RenderError("raised", f"{type(error).__name__}: {error}") from None
        if len(request) > MAX_BYTES:
            raise RenderError(
                "limit", f"was given {len(request) / 2**20:.1f} MiB; {MAX_BYTES // 2**20} MiB are allowed"
            )
        with self._lock:
            for _ in range(TRIES):
                if self._process is None:
                    self._process = TemplateProcess(*self._limits, self._wall_s, self._now)
                reply = self._process.ask(request)
                if reply[0] != "ended":
                    break
                self._process = None
                if reply[1] == signal.SIGPROF:
                    break
        return self._text(reply)

    def _text(self, reply: Sequence[Any]) -> str:
        processor_s, memory = self._limits
        match reply:
            case ["text", str(text)]:
                return text
            case ["syntax", reason, int(line)]:
                raise RenderError("syntax", reason, line)
            case ["undefined" | "refused" as kind, reason]:
                raise RenderError(kind, reason)
            case ["raised", name, reason]:
                raise RenderError("raised", f"{name}: {reason}")
            case ["long"]:
                raise RenderError("limit", f"wrote more than {self._most:,} characters")
            case ["memory"]:
                raise RenderError("limit", f"needed more than {memory / 2**20:,.0f} MiB of memory")
            case ["ended", signal.SIGPROF]:
                raise RenderError("limit", f"took more than {processor_s:g} s of processor time")
            case ["ended", int(number)]:
                how = f"by {signal.Signals(number).name}" if number > 0 else f"with exit code {-number}"
                raise RenderError("limit", f"ended its process {how}")
        raise RenderError("limit", f"gave no answer within {self._wall_s:g} s")


class TemplateProcess:
    """One process of `template_process.py`. Ends with this object."""

    def __init__(self, processor_s: float, memory: int, wall_s: float, now: int | None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            limits = [str(theirs.fileno()), str(processor_s), str(memory), "" if now is None else str(now)]
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, *limits, *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.settimeout(wall_s)
        self._socket, self._process, self._replies = ours, process, unpacker("surrogatepass")
        self.close = weakref.finalize(self, _end, process, ours)

    def ask(self, request: bytes) -> list[Any]:
        """`["ended", SIGNAL]`, or the exit code as a negative number, if the process has ended; `["ended", None]` if it
        was killed."""
        try:
            self._socket.sendall(request)
            while data := self._socket.recv(2**18):
                self._replies.feed(data)
                for reply in self._replies:
                    return list(reply)
            number: int | None = -self._process.wait(self._socket.gettimeout())
        except (TimeoutError, subprocess.TimeoutExpired):
            number = None
        except (OSError, *BAD_BYTES):  # it ended while it was being written to
            number = -self._process.wait()
        self.close()
        return ["ended", number]


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


class ChatTexts:
    """Renders chats as transformers does.

    A tokenizer's own `apply_chat_template` (Mistral's) runs in this process: it is code of transformers, or of a model
    with `model.trust_remote_code`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", renderer: Renderer, template: str | None = None) -> None:
        self._tokenizer, self._renderer, self._template = tokenizer, renderer, template
        home = getattr(tokenizer.apply_chat_template, "__module__", "")
        self._is_jinja = home == "transformers.tokenization_utils_base"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        header: bool,
        tools: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        continued: bool = False,
    ) -> str:
        """`header` adds the beginning of an answer; if `continued`, it continues the last message. Raises RenderError,
        ValueError, and what a tokenizer's own code raises."""
        if not messages:
            raise ValueError("there is no message")
        if not self._is_jinja:
            options: dict[str, Any] = {"chat_template": self._template, **(kwargs or {})}
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                add_generation_prompt=header,
                continue_final_message=continued,
                tokenize=False,
                **options,
            )
            return str(text)
        chat, last = list(messages), ""
        if continued:
            chat[-1], last = marked(messages[-1])
        listed = None if tools is None else list(tools)
        source = self._tokenizer.get_chat_template(self._template, tools=listed)
        names = {"messages": chat, "tools": listed, "documents": None, "add_generation_prompt": header}
        given = {**self._tokenizer.special_tokens_map, **(kwargs or {})}
        text = self._renderer.render("chat", source, given | names)
        return until_mark(text, last) if continued else text


def marked(message: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Append CONTINUED; also return the text before."""
    content = deepcopy(message["content"])
    if isinstance(content, str):
        return {**message, "content": content + CONTINUED}, content
    last = next((part for part in reversed(content) if "text" in part), None)
    if last is None:
        raise ValueError("the last message has no text to continue")
    text = last["text"]
    last["text"] += CONTINUED
    return {**message, "content": content}, text


def until_mark(text: str, last: str) -> str:
    """Return the text before CONTINUED. Raises ValueError if the template changed it."""
    before, found, behind = text.rpartition(CONTINUED.strip())
    if not found or last.strip() not in before:
        raise ValueError(CHANGED)
    return before if behind.startswith(" ") else before.rstrip()
