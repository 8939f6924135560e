"""Imports a user's file as Python would: `load_function(key, "path/to/file.py:function")`.

Child processes can import the module by its name too. It is the file's own name unless another module has that
(`json.py`, a second `score.py`). Then it is PREFIX and the quoted path.
"""

import builtins
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, NamespaceLoader, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, unquote

from configs.own_packages import PACKAGES, ROOT, is_headrace, place_of

PREFIX = f"{__name__}."
INIT = "__init__.py"
__path__: list[str] = []  # makes Python look for modules "within" this one, by its finders


def is_async(function: Any) -> bool:
    return is_of_kind(function, inspect.iscoroutinefunction)


def is_of_kind(function: Any, kind: Callable[[Any], bool]) -> bool:
    """Whether `kind` holds of a function, of what a `partial` calls, or of a `__call__`."""
    while isinstance(function, partial):
        function = function.func
    return any(map(kind, (function, type(function).__call__)))


def load_function(key: str, name: str) -> Callable[..., Any]:
    """Import a function. Raises ValueError with one line."""
    path, _, attribute = name.rpartition(":")
    try:
        module = module_of(path)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ValueError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{key}: {path} has no function {attribute!r}")
    return function


def module_of(file: str) -> ModuleType:
    """The file's folder comes first in `sys.path`, the current folder last. A file in a package may use relative
    imports."""
    path = Path(os.path.abspath(file))
    top, inner = package_of(path)
    name = ".".join([top.stem, *inner])
    taken = not all(part.isidentifier() for part in (top.stem, *inner)) or is_taken(top)
    if taken:
        name = ".".join([PREFIX + quoted(top), *inner])
    make_importable(path.parent, top, taken)
    OWN_NAMES.add(path.parent, top.parent, Path.cwd())
    if name in sys.modules:
        return sys.modules[name]
    # `import_module` would run the packages around the file, which only a relative import needs
    spec = spec_from_file_location(name, path)
    if spec is None:
        raise ImportError(f"{path.name} does not end in .py")
    return loaded(spec)


def loaded(spec: ModuleSpec) -> ModuleType:
    """The module is in `sys.modules` while it runs."""
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    assert spec.loader is not None
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    return sys.modules.get(spec.name, module)  # a module may replace itself


def package_of(path: Path) -> tuple[Path, list[str]]:
    """`/my/score.py` -> `(/my/score.py, [])`; `/my/tools/score.py` in a package -> `(/my/tools, ["score"])`"""
    top, inner = (path.parent, []) if path.name == INIT else (path, list[str]())
    while (top.parent / INIT).is_file() and top.parent != top:
        inner.insert(0, top.stem if top == path else top.name)
        top = top.parent
    return top, inner


def is_taken(top: Path) -> bool:
    if top.stem in sys.modules:
        known = getattr(sys.modules[top.stem], "__file__", None)
        return known is None or not same(known, top)
    found = find_spec(top.stem)
    return found is not None and not is_folder(found) and not same(str(found.origin), top)


def is_folder(found: ModuleSpec) -> bool:
    """Python prefers a file of that name to a folder without `__init__.py`."""
    return found.loader is None or isinstance(found.loader, NamespaceLoader)


def same(known: str, top: Path) -> bool:
    file = top if top.is_file() else top / INIT
    return os.path.realpath(known) == os.path.realpath(file)


def make_importable(folder: Path, top: Path, taken: bool) -> None:
    """Make the folder's other modules importable before all others, in child processes too. A taken name keeps its
    module: `json` stays Python's."""
    if taken and str(folder) not in sys.path:
        sys.path.append(str(folder))
        sys.meta_path.insert(0, Neighbours(str(folder), top.stem))
    elif str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    for further in (*([top.parent] if top.is_dir() else []), Path.cwd()):
        if str(further) not in sys.path:
            sys.path.append(str(further))


def quoted(path: Path) -> str:
    """Quote the path for a module's name, which has no dots."""
    return quote(str(path)).replace(".", "%2E")


class Neighbours(MetaPathFinder):
    """Finds the modules of a folder first, except the taken name."""

    def __init__(self, folder: str, taken: str) -> None:
        self.folder, self.taken = folder, taken

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or fullname == self.taken:
            return None
        found = PathFinder.find_spec(fullname, [self.folder])
        return None if found is None or is_folder(found) else found


class QuotedPaths(MetaPathFinder):
    """Finds files and packages by PREFIX and quoted path, in processes that only unpickle too."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(PREFIX)
        if name == fullname or "." in name:
            return None
        top = Path(unquote(name))
        make_importable(top.parent if top.is_file() else top, top, taken=True)
        OWN_NAMES.add(top.parent, Path.cwd())
        if top.is_dir() and not (top / INIT).is_file():
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(top)]
            return spec
        return spec_from_file_location(fullname, top if top.is_file() else top / INIT)


class OwnNames:
    """Gives a user's files the user's modules that are named as Headrace's packages.

    A submodule that the user's package lacks is Headrace's, as for `from rollout.tasks import Trajectory`.
    """

    def __init__(self) -> None:
        self._places: dict[str, Path] = {}
        self._import, self._import_module = builtins.__import__, importlib.import_module

    def add(self, *folders: Path) -> None:
        """Replaces Python's functions of imports once a folder has such a module."""
        found = {
            name: place
            for folder in reversed(folders)
            if not is_headrace(folder)
            for name in PACKAGES
            if (place := place_of(folder, name))
        }
        if found and not self._places:
            for package in PACKAGES:
                _import_ours(package)
            builtins.__import__, importlib.import_module = self.import_statement, self.import_module  # type: ignore[assignment]
        self._places = found | self._places

    def import_statement(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        own = None if level else self._own_name(name, globals)
        if own is None:
            return self._import(name, globals, locals, fromlist, level)
        module = self._import(own, globals, locals, ("__name__",), 0)
        if fromlist:
            return self._import(own, globals, locals, fromlist, 0)
        top = own[: len(own) - len(name) + len(name.partition(".")[0])]
        return sys.modules[top] if "." in name else module

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        own = self._own_name(name, sys._getframe(1).f_globals)
        return self._import_module(own or name, package)

    def _own_name(self, name: str, importer: Mapping[str, Any] | None) -> str | None:
        top, _, inner = name.partition(".")
        place = self._places.get(top)
        if place is None or is_ours(importer or {}):
            return None
        if inner and place_of_inner(place, inner.partition(".")[0]) is None:
            return None
        return f"{PREFIX}{quoted(place)}{'.' * bool(inner)}{inner}"


def is_ours(module: Mapping[str, Any]) -> bool:
    """Whether these are the names of a module of Headrace, not of a user's."""
    name = str(module.get("__name__"))
    if name == "__main__":  # `python -m learner`
        name = str(module.get("__package__"))
    return name.partition(".")[0] in PACKAGES and not name.startswith(PREFIX)


def place_of_inner(package: Path, name: str) -> Path | None:
    return next((path for path in (package / f"{name}.py", package / name) if path.exists()), None)


def _import_ours(package: str) -> None:
    """Before a user's folder can hide it."""
    sys.path.insert(0, ROOT)
    try:
        importlib.import_module(package)
    finally:
        sys.path.remove(ROOT)


OWN_NAMES = OwnNames()
sys.meta_path.insert(0, QuotedPaths())
