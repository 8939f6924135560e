"""Imports a user's file as Python would: `module_of(path)`, for rewards and tasks.

The module is in `sys.modules` under a name that child processes can import too, so that dataclasses, pydantic, pickle
and process pools work. The name is the file's own unless another module has it (`json.py`, `rollout.py`, a second
`score.py`). Then it is PREFIX and the quoted path: an import of that name imports this module first, which finds the
path.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, NamespaceLoader, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote

PREFIX = f"{__name__}."
"""Prefix of the module name of a file or outermost package whose own name is taken; the quoted path follows."""
INIT = "__init__.py"
__path__: list[str] = []  # makes Python look for modules "within" this one, by its finders


def module_of(file: str) -> ModuleType:
    """Import `file`, relative to the current folder, once; later calls return the same module. Raises what the file
    raises.

    The file's folder comes first in `sys.path`. A file in a package may use relative imports.
    """
    path = Path(os.path.abspath(file))
    top, inner = package_of(path)
    name = ".".join([top.stem, *inner])
    taken = not all(part.isidentifier() for part in (top.stem, *inner)) or is_taken(top)
    if taken:
        name = ".".join([PREFIX + quoted(top), *inner])
    make_importable(path.parent, top, taken)
    if name in sys.modules:
        return sys.modules[name]
    # Not by `import_module`, which would run the packages around the file: only a relative import needs them.
    spec = spec_from_file_location(name, path)
    if spec is None:
        raise ImportError(f"{path.name} does not end in .py")
    return loaded(spec)


def loaded(spec: ModuleSpec) -> ModuleType:
    """Run the module of `spec`; it is in `sys.modules` meanwhile, as in Python."""
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
    """Return the file, or the folder of the outermost package with the file, and the names from there to the file.

    Example: `/my/score.py` -> `(/my/score.py, [])`; `/my/tools/score.py` beside a `__init__.py` ->
    `(/my/tools, ["score"])`
    """
    top, inner = (path.parent, []) if path.name == INIT else (path, list[str]())
    while (top.parent / INIT).is_file() and top.parent != top:
        inner.insert(0, top.stem if top == path else top.name)
        top = top.parent
    return top, inner


def is_taken(top: Path) -> bool:
    """Whether another module has the name of this file or package."""
    if top.stem in sys.modules:
        known = getattr(sys.modules[top.stem], "__file__", None)
        return known is None or not same(known, top)
    found = find_spec(top.stem)
    return found is not None and not is_folder(found) and not same(str(found.origin), top)


def is_folder(found: ModuleSpec) -> bool:
    """Whether it is a folder without `__init__.py`: Python prefers any file of that name."""
    return found.loader is None or isinstance(found.loader, NamespaceLoader)


def same(known: str, top: Path) -> bool:
    """Whether the module's file `known` is the file or package `top`."""
    file = top if top.is_file() else top / INIT
    return os.path.realpath(known) == os.path.realpath(file)


def make_importable(folder: Path, top: Path, taken: bool) -> None:
    """Make the other modules in the file's folder importable, before all others and in child processes too, which get
    `sys.path`. A taken name keeps its module: `json` stays Python's."""
    if taken and str(folder) not in sys.path:
        sys.path.append(str(folder))
        sys.meta_path.insert(0, Neighbours(str(folder), top.stem))
    elif str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if top.is_dir() and str(top.parent) not in sys.path:
        sys.path.append(str(top.parent))


def quoted(path: Path) -> str:
    """Quote the path for a module's name, which has no dots."""
    return quote(str(path)).replace(".", "%2E")


class Neighbours(MetaPathFinder):
    """Finds the modules of a folder before all others, except the taken name."""

    def __init__(self, folder: str, taken: str) -> None:
        self.folder, self.taken = folder, taken

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find only top-level modules."""
        if path is not None or fullname == self.taken:
            return None
        found = PathFinder.find_spec(fullname, [self.folder])
        return None if found is None or is_folder(found) else found


class QuotedPaths(MetaPathFinder):
    """Finds files and packages by PREFIX and quoted path, also in processes that only unpickle their objects."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the file or package itself; Python finds the modules inside the package."""
        name = fullname.removeprefix(PREFIX)
        if name == fullname or "." in name:
            return None
        top = Path(unquote(name))
        make_importable(top.parent if top.is_file() else top, top, taken=True)
        return spec_from_file_location(fullname, top if top.is_file() else top / INIT)


sys.meta_path.insert(0, QuotedPaths())
