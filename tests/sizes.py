"""`python -m tests.sizes`: prints the size of the tree, for reviewers. It has no limits.

For each package: files, lines of code, words of docstrings and comments. Then the largest files, classes and functions
of core.
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from configs.inner_command import inner_words

ROOT = Path(__file__).parents[1]
CORE = ("actors", "buffer", "configs", "headrace", "learner", "rollout")
PACKAGES = (*CORE, "benchmarks", "examples", "tests")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Size(NamedTuple):
    """A file, class or function: its place and lines, and for a class its methods and attributes."""

    lines: int
    where: str
    note: str = ""


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Strings that stand alone as statements: docstrings, also those below a field or a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def tokens(source: str) -> Iterable[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)


def code_lines(source: str) -> int:
    """Lines of code: neither blank nor comment nor docstring."""
    docstrings: set[int] = set()
    for text in strings(ast.parse(source)):
        docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokens(source):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def words(source: str) -> int:
    """Words of docstrings and comments."""
    docs = [str(text.value) for text in strings(ast.parse(source))]
    comments = [token.string.lstrip("# ") for token in tokens(source) if token.type == tokenize.COMMENT]
    return sum(len(text.split()) for text in (*docs, *comments))


def attributes(owner: ast.ClassDef) -> int:
    """Attributes of `self` that the methods assign, and fields of the class body."""
    names = {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    fields = {
        node.target.id for node in owner.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return len(names | fields)


def definitions(source: str, file: str) -> tuple[list[Size], list[Size]]:
    """Classes and functions of a file, methods as `Class.method`."""
    classes, functions = [], []

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{inside}.{child.name}" if inside else child.name
                lines, where = (child.end_lineno or child.lineno) - child.lineno + 1, f"{file} {name}"
                if isinstance(child, ast.ClassDef):
                    methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in child.body)
                    classes.append(Size(lines, where, f"{methods} methods, {attributes(child)} attributes"))
                else:
                    functions.append(Size(lines, where))
                visit(child, name)

    visit(ast.parse(source), "")
    return classes, functions


def main(largest: int = 12, packages: Sequence[str] = PACKAGES) -> None:
    print(f"{'package':<12}{'files':>8}{'code':>10}{'words':>10}")
    sizes: dict[str, list[Size]] = {"files": [], "classes": [], "functions": []}
    for package in packages:
        sources = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / package).rglob("*.py")}
        code, text = sum(map(code_lines, sources.values())), sum(map(words, sources.values()))
        print(f"{package:<12}{len(sources):>8,}{code:>10,}{text:>10,}")
        for file, source in sources.items() if package in CORE else ():
            classes, functions = definitions(source, file)
            sizes["files"].append(Size(source.count("\n"), file))
            sizes["classes"] += classes
            sizes["functions"] += functions
    for what, found in sizes.items():
        print(f"\nlargest {what} of core, in lines")
        for size in sorted(found, reverse=True)[:largest]:
            print(f"{size.lines:>6}  {size.where}  {size.note}".rstrip())


if __name__ == "__main__":
    inner_words()
    main()
