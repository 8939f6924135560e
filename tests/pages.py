"""The pages of the tree: which there are, their headings, links and navigation. Pure but for reading files."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^\s*```.*?^\s*```[^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\]\\]|\\.)*\]\(([^)\s]+)\)")


class PageLink(NamedTuple):
    """A relative link of a page: the file it leads to, and the heading if it names one."""

    source: str
    target: Path
    anchor: str


class ReaderPath(NamedTuple):
    """Where the answer to a question of a reader stands: a link of the README, and a heading of that page.

    Example: `ReaderPath("My run hangs.", "docs/stalls.md", "Who waits for whom")`
    """

    question: str
    page: str
    heading: str


def pages() -> list[Path]:
    """All pages that link to each other."""
    return sorted(
        [
            *DOCS.rglob("*.md"),
            *(ROOT / "examples").glob("*/README.md"),
            *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/LOG.md")),
        ]
    )


def prose(page: Path) -> str:
    """The text of a page without its blocks of code; lines keep their numbers."""
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))


@cache
def headings(page: Path) -> list[str]:
    """The headings of a page, in order."""
    return re.findall(r"^#{1,6} (.+?)\s*$", prose(page), re.MULTILINE)


def anchor(heading: str) -> str:
    """The anchor of a heading, on the site as in a repository's view. Example: `Its own (a, b)` -> `its-own-a-b`"""
    text = LINK.sub(lambda link: link[0].partition("](")[0].lstrip("!["), heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def links(page: Path) -> Iterator[PageLink]:
    """The relative links of a page."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    for found in LINK.finditer(text):
        if not re.match(r"[a-z]+:", found[1]):
            path, _, name = found[1].partition("#")
            target = (page.parent / path).resolve() if path else page
            yield PageLink(str(page.relative_to(ROOT)), target, name)


def broken(link: PageLink) -> str | None:
    """Why a link leads nowhere, in words; None if it is whole."""
    shown = f"{link.source}: {link.target.relative_to(ROOT) if link.target.is_relative_to(ROOT) else link.target}"
    if not link.target.exists():
        return f"{shown}: no such file"
    if link.anchor and link.anchor not in map(anchor, headings(link.target)):
        return f"{shown}#{link.anchor}: no such heading"
    return None


def navigation() -> list[str]:
    """The pages of the site's navigation, in order, as mkdocs.yml names them."""

    def leaves(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for child in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from leaves(child)

    text = re.sub(r"!!python\S*", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return list(leaves(yaml.safe_load(text)["nav"]))
