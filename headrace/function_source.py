"""Writes a reward function of a notebook or a script, with all that it uses, into a file for the reward workers.

The file's name holds a digest: another function is another value of `reward.function`, which a run that has begun
refuses. Imports only the standard library.
"""

import ast
import builtins
import dis
import hashlib
import inspect
import linecache
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
OF_MODULE = ("__name__", "__doc__", "__package__", "__spec__", "__loader__", "__file__", "__builtins__")
REMEDY = "write the function into a file, and set reward.function: path/to/file.py:function"


class NoSource(ValueError):
    """The reward workers cannot get this function."""


def reward_file(function: Callable[..., Any], folder: Path) -> str:
    """Return `path/to/file.py:function`, a file in `folder` unless an imported module has the function.

    Raises NoSource for a lambda, a closure, a method, or an object without source.
    """
    if not isinstance(function, FunctionType):
        given = "a method" if inspect.ismethod(function) else f"an object of {type(function).__name__}"
        raise NoSource(
            f"reward: {given} is no function with a source; give a function, and its settings as reward.kwargs"
        )
    if known := _file_of(function):
        return f"{known}:{function.__name__}"
    text = Source(function).text()
    file = folder / f"{function.__name__}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    return f"{file}:{function.__name__}"


class Source:
    """A module with the function and all that it uses."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self._texts: dict[str, str] = {}
        """In the order that Python needs."""
        self._began: set[str] = set()

    def text(self) -> str:
        """Raises NoSource."""
        self._define(self.function.__name__, self.function, self.function.__globals__)
        about = f'"""The reward function `{self.function.__name__}`, as `headrace.launch` was given it."""'
        future = self.function.__code__.co_flags & __import__("__future__").annotations.compiler_flag
        first = [about, *(["from __future__ import annotations"] if future else [])]
        return "\n\n".join([*first, *self._texts.values()]) + "\n"

    def _define(self, name: str, value: Any, names: Mapping[str, Any]) -> None:
        """Texts of what `name` uses come first."""
        if name in self._began:
            return
        self._began.add(name)
        if (line := _one_line(name, value)) is not None:
            self._texts[name] = line
            return
        if not isinstance(inspect.unwrap(value) if callable(value) else value, FunctionType | type):
            kind = type(value).__name__
            uses = f"{self.function.__name__} uses {name}, an object of {kind}, which has no source"
            raise NoSource(f"reward: {uses}; make it inside of the function, or {REMEDY}")
        own, text = value.__name__, _source(value)
        for used in _used(compile(text, own, "exec")):
            if used in OF_MODULE:
                continue
            if used in names:
                if used != own:
                    self._define(used, names[used], names)
            elif not hasattr(builtins, used) and used != own:
                raise NoSource(f"reward: {own} uses {used}, which is not defined; define it, or {REMEDY}")
        self._texts[name] = text if own == name else f"{text}\n{name} = {own}"


def _file_of(function: FunctionType) -> str | None:
    """None for a notebook's or a script's own function."""
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if function.__module__ == "__main__" or not file or getattr(module, function.__name__, None) is not function:
        return None
    return os.path.abspath(file) if file.endswith(".py") else None


def _one_line(name: str, value: Any) -> str | None:
    """None if its source is needed."""
    if isinstance(value, ModuleType):
        plain = value.__name__ == name
        return f"import {name}" if plain else f"import {value.__name__} as {name}"
    if isinstance(value, re.Pattern):
        return f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})"
    if (text := _literal(value)) is not None:
        return f"{name} = {text}"
    module = getattr(value, "__module__", None)
    for there in dict.fromkeys(getattr(value, key, None) for key in ("__qualname__", "__name__", "_name")):
        found = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
        if isinstance(there, str) and found is not None and getattr(found, there, None) is value:
            return f"from {module} import {there}" + (f" as {name}" if there != name else "")
    return None


def _literal(value: Any) -> str | None:
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return repr(value) if abs(value) < float("inf") else None
    pairs = type(value) is dict
    if not pairs and type(value) not in (list, tuple, set, frozenset):
        return None
    inner = [(_literal(key), _literal(value[key] if pairs else None)) for key in value]
    if any(None in pair for pair in inner):
        return None
    texts = [f"{key}: {of}" if pairs else str(key) for key, of in inner]
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}([{', '.join(sorted(texts))}])"  # its order differs between processes
    if isinstance(value, tuple):
        return f"({''.join(f'{text}, ' for text in texts)})"
    return f"{{{', '.join(texts)}}}" if pairs else f"[{', '.join(texts)}]"


def _source(value: Any) -> str:
    """Raises NoSource."""
    kind, name = ("class" if isinstance(value, type) else "function"), value.__name__
    if name == "<lambda>":
        raise NoSource(
            f"reward: a lambda has no name that workers can import; write it as a function with `def`, or {REMEDY}"
        )
    if not isinstance(value, type) and (free := inspect.unwrap(value).__code__.co_freevars):
        over = ", ".join(free)
        remedy = f"pass it as reward.kwargs, or {REMEDY}"
        raise NoSource(f"reward: {name} is a closure over {over}, which workers do not have; {remedy}")
    try:
        text = textwrap.dedent(_class_source(value) if isinstance(value, type) else inspect.getsource(value))
        defined = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError):
        raise NoSource(f"reward: the source of the {kind} {name} is not known here; {REMEDY}") from None
    if hasattr(value, "__wrapped__") and not getattr(defined, "decorator_list", []):
        raise NoSource(
            f"reward: {name} was wrapped after its definition; write the wrapper as a decorator, or {REMEDY}"
        )
    return text


def _class_source(value: type) -> str:
    """A notebook's module has no file, so a function locates the class. Raises OSError."""
    for function in vars(value).values():
        if not isinstance(code := getattr(function, "__code__", None), CodeType):
            continue
        lines = linecache.getlines(code.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                if first <= code.co_firstlineno <= (node.end_lineno or first):
                    return "".join(lines[first - 1 : node.end_lineno])
    return inspect.getsource(value)


def _used(code: CodeType) -> Iterator[str]:
    """Global names read before they are bound."""
    own = set[str]()
    for step in dis.get_instructions(code):
        if step.opname in LOADS and not (step.opname == "LOAD_NAME" and step.argval in own):
            yield str(step.argval)
        elif step.opname == "STORE_NAME":
            own.add(str(step.argval))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _used(inner)
