"""`python -m tests.sentences [PATH ...]`: lists sentences that readers must decode.

Looks at docstrings, comments and messages of core, at docstrings of tests, and at pages (`.md`). Two things are
forbidden: a sentence that begins without its subject, and a verb of narration (`tell`, `hear`) where nobody speaks.
Prints `file:line: kind: sentence` for each, then a count by folder and kind; exit code 1 if there are any.
"""

import argparse
import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from configs.inner_command import inner_words
from tests.sizes import CORE, ROOT, strings, tokens

KINDS = {
    "those of": re.compile(r"^(?:Those|That|Ones?) (?:of|which|who|in|under|without|with|by|for|from)\b"),
    "of": re.compile(r"^Of (?!course\b)"),
    "none is": re.compile(
        r"^(?:None|All|Both|Neither|Nothing|Each|Any) (?:is|are|was|were|has|have|does|do)(?: (?!X)\w+)?$"
    ),
    "what it": re.compile(
        r"^(?:What|Whatever|Where|Who|Whoever|How|Why) (?:it|they|he|she)\b"
        r"|^(?:What|Whatever|Where|Who|Whoever|How|Why) (?:this|these|those|that) (?:is|are|was|were|has|had)\b"
    ),
    "narration": re.compile(
        r"\b(?:tell|tells|telling|told|hear|hears|hearing|heard)\b(?! apart)"
        r"|\bof before\b|\ba late word\b|\bwithout a word\b|\bsays? no more\b"
    ),
}
"""Kinds of sentences by name, with what they begin with or hold."""
MESSAGES = ("Error", "Refused", "Dead", "warning", "info", "error", "exception", "critical", "fail", "print_visible")
"""Ends of names of calls whose texts a user reads."""
CODE = re.compile(r"`[^`]*`")
NOT_ENGLISH = re.compile(r"^```.*?^```$|^(?: {4}|\t)\S[^\n]*$|<!--.*?-->", re.MULTILINE | re.DOTALL)
"""Code and comments of a page."""
MARKS = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)")
"""Links, of which the text is read, and emphasis."""
CELLS = re.compile(r"(?<!\\)\|")
BREAK = re.compile(r"(?<=[.:;!?])\s+(?=[A-Z`\"])|\n\s*\n|\n\s*(?:[-*|] )")


class Text(NamedTuple):
    """A docstring, comment or message, with its first line in the file."""

    line: int
    text: str


class Found(NamedTuple):
    """A sentence of a forbidden kind."""

    file: str
    line: int
    kind: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.sentence}"


def texts(source: str, messages: bool) -> Iterator[Text]:
    """Docstrings of a file and, with `messages`, its comments and messages."""
    tree = ast.parse(source)
    yield from (Text(node.lineno, str(node.value)) for node in strings(tree))
    if not messages:
        return
    yield from comments(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(MESSAGES):
            for part in (*node.args, *(word.value for word in node.keywords)):
                if isinstance(part, ast.Constant | ast.JoinedStr | ast.List):
                    yield Text(part.lineno, shown(part))


def comments(source: str) -> Iterator[Text]:
    """Comments of a file; lines below each other are one text."""
    begun: Text | None = None
    last = -1
    for token in tokens(source):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("# ")
        if begun is not None and token.start[0] == last + 1 and token.line.lstrip().startswith("#"):
            begun = Text(begun.line, f"{begun.text} {text}")
        else:
            if begun is not None:
                yield begun
            begun = Text(token.start[0], text)
        last = token.start[0]
    if begun is not None:
        yield begun


def paragraphs(page: str) -> Iterator[Text]:
    """Paragraphs, items of lists, headings and cells of tables of a page, without code and marks."""
    page = NOT_ENGLISH.sub(lambda code: "\n" * code[0].count("\n"), page)
    begun: Text | None = None
    for number, line in enumerate([*page.splitlines(), ""], 1):
        text = MARKS.sub(lambda mark: mark[1] or "", line).strip()
        if begun is not None and (not text or re.match(r"[-|#>]|\d+\. ", text)):
            yield begun
            begun = None
        if text.startswith("|"):
            yield from (Text(number, cell.strip()) for cell in CELLS.split(text) if cell.strip(" -"))
        elif text:
            lone = re.sub(r"^(?:[-#>]+|\d+\.) ", "", text)
            begun = Text(begun.line, f"{begun.text}\n{text}") if begun is not None else Text(number, lone)


def shown(node: ast.expr) -> str:
    """The text of a message; values stand as `X`."""
    if isinstance(node, ast.List):
        return ". ".join(map(shown, node.elts))
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def sentences(text: Text) -> Iterator[Text]:
    """The sentences of a text, with code replaced by `X`, each with its line."""
    begin = 0
    for end in (*BREAK.finditer(text.text), None):
        stop = end.start() if end is not None else len(text.text)
        sentence = " ".join(CODE.sub("X", text.text[begin:stop]).split())
        if sentence:
            yield Text(text.line + text.text[:begin].count("\n"), sentence)
        begin = end.end() if end is not None else stop


def kind_of(sentence: str) -> str | None:
    """The forbidden kind of a sentence; None for a plain one."""
    return next((name for name, form in KINDS.items() if form.search(sentence.rstrip(".:;"))), None)


def judged(source: str, file: str, messages: bool = True) -> Iterator[Found]:
    """Sentences of a file that are of a forbidden kind."""
    for text in paragraphs(source) if file.endswith(".md") else texts(source, messages):
        for sentence in sentences(text):
            if kind := kind_of(sentence.text):
                yield Found(file, sentence.line, kind, sentence.text)


def in_folders(folders: Sequence[str]) -> Iterator[Found]:
    """Sentences of a forbidden kind in all Python files and pages below some folders, or in a file."""
    for folder in folders:
        for path in files_below(ROOT / folder):
            file = str(path.relative_to(ROOT))
            yield from judged(path.read_text(encoding="utf-8"), file, not file.startswith("tests/"))


def files_below(place: Path) -> list[Path]:
    """The Python files and pages below a folder, or the file itself."""
    found = [path for path in place.rglob("*") if path.suffix in (".py", ".md")]
    return sorted(found) if place.is_dir() else [place]


def counts(found: Sequence[Found]) -> Iterator[str]:
    """A line for each folder and kind, the most frequent first."""
    numbers = Counter((str(Path(each.file).parent), each.kind) for each in found)
    for (folder, kind), number in sorted(numbers.items(), key=lambda item: (-item[1], item[0])):
        yield f"{number:5}  {folder:<30} {kind}"


def main(argv: Sequence[str]) -> int:
    """Print what was found below the folders, or in all of core and the tests."""
    parser = argparse.ArgumentParser("python -m tests.sentences", description="Lists sentences that must be decoded.")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="folder or file of the tree; default: core and tests")
    paths = parser.parse_args(argv).paths or [*CORE, "tests"]
    for path in paths:
        place = (ROOT / path).resolve()
        if not place.is_relative_to(ROOT) or not (
            place.is_dir() or (place.is_file() and place.suffix in (".py", ".md"))
        ):
            parser.error(f"{path}: no folder, Python file or page of the tree {ROOT}; name one that is there")
    found = list(in_folders(paths))
    for each in found:
        print(each)
    for line in counts(found):
        print(line)
    print(f"{len(found)} sentences")
    return int(bool(found))


if __name__ == "__main__":
    inner_words(further="FOLDER")
    sys.exit(main(sys.argv[1:]))
