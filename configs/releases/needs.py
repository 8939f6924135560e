"""What Headrace needs of a library, symbol by symbol, and the judgement of a release."""

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from configs.releases.source import Definition, Found, Parameters, Source


@dataclass(frozen=True)
class Need:
    """`Need("lib.cache.Cache", "blocks are shared only when they are full", has="usage", calls=("get(key)",))`"""

    path: str
    why: str
    has: str = ""
    """Attributes: `a|b` means either, `a?` means only where it exists."""
    calls: tuple[str, ...] = ()
    """Calls of a method, or of the symbol: parameters in order, then `name=...` for those by name."""
    replaces: tuple[str, ...] = ()
    """Overridden methods with all parameters; `...` stands for any others."""
    implements: str = ""
    """Methods that a base class of Headrace's own leaves abstract; `a?` means only where it exists."""
    follows: str = ""
    """Methods whose body Headrace's own code follows."""
    since: str = ""

    def concerns(self, source: Source) -> bool:
        return not source.number or numbers(source.number) >= numbers(self.since)


def moved(needs: Iterable[Need], source: Source) -> Iterator[str]:
    for need in needs:
        found = source.find(need.path)
        if not need.concerns(source):
            continue
        if found is None:
            yield f"{need.path} is not there ({need.why})"
        else:
            yield from (f"{need.path} {problem} ({need.why})" for problem in problems(need, found, source))


def numbers(version: str) -> tuple[int, ...]:
    """`5.19.0rc1` -> (5, 19, 0)"""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", version)[0]))


def problems(need: Need, found: Found, source: Source) -> Iterator[str]:
    names = source.attributes(found) if isinstance(found.node, ast.ClassDef) else set[str]()
    for wanted in need.has.split():
        either = wanted.split("|")
        if not wanted.endswith("?") and not names & set(either):
            yield f"has no {' or '.join(either)}"
    for form in need.calls:
        yield from differences(form, need, found, source, exact=False)
    for form in need.replaces:
        yield from differences(form, need, found, source, exact=True)
    if need.implements:
        known, left = {name.rstrip("?") for name in need.implements.split()}, source.abstract_methods(found)
        if further := sorted(left - known):
            yield f"leaves {', '.join(further)} abstract, which Headrace does not implement"


def differences(form: str, need: Need, found: Found, source: Source, exact: bool) -> Iterator[str]:
    """Yield how a function differs from the form in which Headrace calls it, or, if `exact`, replaces it."""
    call = ast.parse(form, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    name, itself = call.func.id, call.func.id == need.path.rpartition(".")[2]
    function = found if itself else source.member(found, name)
    parameters = source.parameters(function) if function is not None else None
    if parameters is None:
        yield f"has no {name}()"
        return
    given = [each.id for each in call.args if isinstance(each, ast.Name)]
    open_ended = any(isinstance(each, ast.Constant) for each in call.args)
    named = {str(each.arg) for each in call.keywords}
    yield from unequal(f"{name}()", parameters, given, named, open_ended, exact)


def unequal(
    name: str, parameters: Parameters, given: list[str], named: set[str], open_ended: bool, exact: bool
) -> Iterator[str]:
    places = list(parameters.positional)
    if places[: len(given)] != given and not (parameters.extra_positional and not places):
        yield f"has {name} with parameters {', '.join(places) or 'none'}, not {', '.join(given)}"
    elif missing := sorted(named - parameters.named) if not parameters.extra_named else []:
        yield f"has {name} without a parameter {', '.join(missing)}"
    elif needed := sorted(parameters.required - {*given, *named}) if not open_ended else []:
        yield f"has {name} that also requires {', '.join(needed)}"
    elif exact and not open_ended and (more := sorted(parameters.named - {*given, *named})):
        yield f"has {name} with the further parameter {', '.join(more)}"


def rewritten(needs: Iterable[Need], before: Source, after: Source) -> Iterator[str]:
    """Yield a diff of each changed function that Headrace follows or replaces: somebody has to read it."""
    for need in needs:
        for name in dict.fromkeys([*need.follows.split(), *(form.partition("(")[0] for form in need.replaces)]):
            path = need.path if name == need.path.rpartition(".")[2] else f"{need.path}.{name}"
            old, new = body(before.find(path)), body(after.find(path))
            if old != new:
                lines = difflib.unified_diff(old, new, f"{path} {before.number}", f"{path} {after.number}", lineterm="")
                yield "\n".join(lines)


def body(found: Found | None) -> list[str]:
    """The lines of a definition without comments and docstrings; [] of one that is not there."""
    if found is None:
        return []
    return ast.unparse(without_docstrings(found.node)).splitlines()


def without_docstrings(node: Definition) -> Definition:
    again = ast.parse(ast.unparse(node))
    for each in ast.walk(again):
        lines = getattr(each, "body", None)
        if isinstance(lines, list):
            texts = [line for line in lines if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)]
            each.body = [line for line in lines if line not in texts] or [ast.Pass()]  # type: ignore[attr-defined]
    return again
