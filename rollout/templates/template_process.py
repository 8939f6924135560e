"""The process of `renderer.py`: renders Jinja templates in Jinja's sandbox.

The kernel ends it after too much processor time (SIGPROF), even inside one call of C. Imports nothing slow.
"""

import json
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import msgpack
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollout.cage.frames import unpacker

CACHED = 32
ERROR_CHARACTERS = 2000
"""A template may put a whole row into an error."""


class GenerationTag(Extension):
    """The tag `generation`, whose body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own form

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


def raise_exception(message: str) -> NoReturn:
    """How a chat template refuses a chat."""
    raise jinja2.TemplateError(message)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """transformers' filter, which does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def chat_environment() -> jinja2.Environment:
    """Return the environment of transformers' chat templates; a test compares both."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


def text_environment(keep_last_line_break: bool) -> jinja2.Environment:
    """Return an environment in which a missing name is an error."""
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=keep_last_line_break)


ENVIRONMENTS: Mapping[str, jinja2.Environment] = {
    "chat": chat_environment(),
    "text": text_environment(True),
    "file": text_environment(False),
}


@lru_cache(CACHED)
def compiled(kind: str, source: str) -> jinja2.Template:
    return ENVIRONMENTS[kind].from_string(source)


def rendered(template: jinja2.Template, names: Mapping[str, Any], most: int) -> str | None:
    """Return None above `most` characters."""
    pieces, size = [], 0
    for piece in template.generate(names):
        size += len(piece)
        if size > most:
            return None
        pieces.append(piece)
    return "".join(pieces)


def answer(kind: str, source: str, names: Mapping[str, Any] | None, most: int) -> list[Any]:
    """Return `["text", ...]`, or why there is none. Without `names`, only compile."""
    try:
        template = compiled(kind, source)
        text = "" if names is None else rendered(template, names, most)
    except jinja2.TemplateSyntaxError as error:
        return ["syntax", error.message or "", error.lineno]
    except jinja2.UndefinedError as error:
        return ["undefined", _text(error)]
    except jinja2.TemplateError as error:
        return ["refused", _text(error)]
    except MemoryError:
        return ["memory"]
    except Exception as error:
        return ["raised", type(error).__name__, _text(error)]
    return ["long"] if text is None else ["text", text]


def _text(error: Exception) -> str:
    return str(error)[:ERROR_CHARACTERS]


def serve(fd: int, processor_s: float, memory: int, now: int | None) -> None:
    """`now`: as in `Renderer`."""
    if now is not None:
        ENVIRONMENTS["chat"].globals["strftime_now"] = datetime.fromtimestamp(now, UTC).replace(tzinfo=None).strftime
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to all of a job, and the server's drain renders
    connection, requests = socket.socket(fileno=fd), unpacker("surrogatepass")
    while data := connection.recv(2**18):
        requests.feed(data)
        for kind, source, names, most in requests:
            signal.setitimer(signal.ITIMER_PROF, processor_s)
            reply = answer(kind, source, names, most)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(msgpack.packb(reply, unicode_errors="surrogatepass"))
