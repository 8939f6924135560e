"""Reads the source of a library's release without importing it: from an installed package, a folder or a wheel."""

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign | ast.Module
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    module: str
    node: Definition


@dataclass(frozen=True)
class Parameters:
    """`def f(self, a, b=1, *, c)` has positional a and b, required a and c, named a, b and c."""

    positional: tuple[str, ...]
    named: frozenset[str]
    required: frozenset[str]
    extra_positional: bool
    extra_named: bool


class Source:
    """Python files of one release. `root` holds the package."""

    def __init__(self, root: Path | zipfile.Path, package: str, number: str = "") -> None:
        self.root, self.package, self.number = root, package, number
        self._trees: dict[str, ast.Module | None] = {}

    @classmethod
    def installed(cls, package: str, *distributions: str) -> "Source | None":
        found = find_spec(package)
        if found is None or found.origin is None:
            return None
        return cls(
            Path(found.origin).parent.parent, package, next(map(version, filter(has_version, distributions)), "")
        )

    @classmethod
    def of_wheel(cls, wheel: Path, package: str) -> "Source":
        """Raises ValueError."""
        if not zipfile.is_zipfile(wheel):
            raise ValueError(f"{wheel}: not a wheel")
        source = cls(zipfile.Path(wheel), package, wheel.name.split("-")[1] if "-" in wheel.name else "")
        if source.tree(package) is None:
            raise ValueError(f"{wheel}: has no package {package}")
        return source

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            parts = module.split(".")
            files = (self.root.joinpath(*parts[:-1], f"{parts[-1]}.py"), self.root.joinpath(*parts, "__init__.py"))
            file = next((file for file in files if file.is_file()), None)
            self._trees[module] = ast.parse(file.read_text(encoding="utf-8")) if file is not None else None
        return self._trees[module]

    def is_package(self, module: str) -> bool:
        return self.root.joinpath(*module.split("."), "__init__.py").is_file()

    def find(self, path: str) -> Found | None:
        """`module.Name`, `module.Class.method` or `module`."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            module, names = ".".join(parts[:length]), parts[length:]
            tree = self.tree(module)
            if tree is None:
                continue
            found: Found | None = Found(module, tree)
            for name in names:
                found = self.member(found, name) if found is not None else None
            return found
        return None

    def member(self, owner: Found, name: str) -> Found | None:
        if isinstance(owner.node, ast.ClassDef):
            for each in self.ancestry(owner):
                if (node := last(each.node, name)) is not None:
                    return Found(each.module, node)
            return None
        return self._in_module(owner.module, name, set()) if isinstance(owner.node, ast.Module) else None

    def _in_module(self, module: str, name: str, seen: set[tuple[str, str]]) -> Found | None:
        tree = self.tree(module)
        if tree is None or (module, name) in seen:
            return None
        seen.add((module, name))
        if (node := last(tree, name)) is not None:
            return Found(module, node)
        for statement in statements(tree):
            if not isinstance(statement, ast.ImportFrom):
                continue
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    home = self._home(module, statement)
                    if (found := self._in_module(home, alias.name, seen)) is not None:
                        return found
        return None

    def _home(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        parts = module.split(".") if self.is_package(module) else module.split(".")[:-1]
        base = parts[: len(parts) - statement.level + 1]
        return ".".join([*base, *([statement.module] if statement.module else [])])

    def ancestry(self, owner: Found) -> Iterator[Found]:
        """Nearest first."""
        waiting, seen = [owner], set[int]()
        while waiting:
            each = waiting.pop(0)
            if not isinstance(each.node, ast.ClassDef) or id(each.node) in seen:
                continue
            seen.add(id(each.node))
            yield each
            for base in each.node.bases:
                name = base.value if isinstance(base, ast.Subscript) else base
                found = self._in_module(each.module, name.id, set()) if isinstance(name, ast.Name) else None
                if found is not None:
                    waiting.append(found)

    def attributes(self, owner: Found) -> set[str]:
        """Names in class bodies, and what methods set on `self`."""
        return {name for each in self.ancestry(owner) for name in attributes_of(each.node)}

    def abstract_methods(self, owner: Found) -> set[str]:
        found, made = set[str](), set[str]()
        for each in self.ancestry(owner):
            assert isinstance(each.node, ast.ClassDef)
            methods = [node for node in each.node.body if isinstance(node, FUNCTIONS)]
            found |= {node.name for node in methods if is_abstract(node) and node.name not in made}
            made |= {node.name for node in methods}
        return found

    def parameters(self, found: Found) -> Parameters | None:
        if isinstance(found.node, FUNCTIONS):
            return parameters_of(found.node)
        if not isinstance(found.node, ast.ClassDef):
            return None
        made = self.member(found, "__init__")
        if made is not None and isinstance(made.node, FUNCTIONS):
            return parameters_of(made.node)
        fields = self.fields(found)
        required = frozenset(name for name, needed in fields.items() if needed)
        return Parameters(tuple(fields), frozenset(fields), required, False, False)

    def fields(self, owner: Found) -> dict[str, bool]:
        """Fields of a dataclass, a pydantic model or a msgspec structure, and whether they are required."""
        fields: dict[str, bool] = {}
        for each in reversed([*self.ancestry(owner)]):
            assert isinstance(each.node, ast.ClassDef)
            for node in each.node.body:
                is_field = isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.dump(node.annotation)
                if isinstance(node, ast.AnnAssign) and is_field and isinstance(node.target, ast.Name):
                    fields[node.target.id] = node.value is None
        return fields


def has_version(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Also those under `if`, `try` and `with`."""
    for field in ("body", "orelse", "handlers", "finalbody"):
        for node in getattr(tree, field, ()):
            if isinstance(node, ast.stmt):
                yield node
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from statements(node)


def names_of(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            targets = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            yield from (each.id for each in targets if isinstance(each, ast.Name))


def last(tree: ast.AST, name: str) -> Definition | None:
    """Overloads and branches come before the last definition."""
    found = None
    for node in statements(tree):
        if name in names_of(node) and isinstance(node, ast.ClassDef | ast.Assign | ast.AnnAssign | FUNCTIONS):
            found = node
    return found


def attributes_of(node: ast.AST) -> Iterator[str]:
    for statement in statements(node):
        yield from names_of(statement)
        for each in ast.walk(statement) if isinstance(statement, FUNCTIONS) else ():
            is_set = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
            if isinstance(each, ast.Attribute) and is_set and ast.unparse(each.value) == "self":
                yield each.attr


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Last names of the decorators."""
    return {getattr(each, "attr", getattr(each, "id", "")) for each in node.decorator_list}


def is_abstract(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return "abstractmethod" in decorators(node)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    """The parameters without `self` or `cls`."""
    given = node.args
    by_place = [each.arg for each in (*given.posonlyargs, *given.args)]
    needed = by_place[: len(by_place) - len(given.defaults)]
    needed += [each.arg for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value is None]
    if by_place[:1] in (["self"], ["cls"]) and "staticmethod" not in decorators(node):
        by_place, needed = by_place[1:], [name for name in needed if name not in ("self", "cls")]
    named = frozenset({*by_place, *(each.arg for each in given.kwonlyargs)})
    return Parameters(tuple(by_place), named, frozenset(needed), given.vararg is not None, given.kwarg is not None)
