"""The judgement of a release: whatever moves is named, and nothing that fits is."""

from pathlib import Path

import pytest

from configs.releases import of_transformers
from configs.releases.needs import Need, moved, rewritten
from configs.releases.source import Source

MODULE = """
from abc import abstractmethod
class Cache:
    usage: float
    def __init__(self, size): self.size = size
    def get(self, key, default=None): return key
    def put(self, key, value, *, strict): ...
    def many(self, *keys, **options): ...
    @abstractmethod
    def drop(self): ...
def load(path, mode="r"):
    '''Text.'''
    return path  # a comment
"""
FITS = Need(
    "lib.Cache",
    "it caches",
    has="usage size|length absent?",
    calls=(
        "Cache(size)",
        "get(key)",
        "get(key, default)",
        "put(key, value, strict=...)",
        "many(any=...)",
        "many(a, b)",
    ),
    replaces=("get(key, default)", "put(key, ...)"),
    implements="drop later?",
    follows="get",
)


def library(folder: Path, text: str = MODULE, number: str = "1.0") -> Source:
    """A library of one module."""
    folder.mkdir(exist_ok=True)
    (folder / "lib.py").write_text(text)
    return Source(folder, "lib", number)


def test_a_release_that_meets_a_need_is_not_mentioned(tmp_path: Path) -> None:
    needs = [FITS, Need("lib.load", "it loads", calls=("load(path)",)), Need("lib", "the module")]
    assert list(moved(needs, library(tmp_path))) == []


@pytest.mark.parametrize(
    ("need", "problem"),
    [
        (Need("lib.Gone", "w"), "lib.Gone is not there (w)"),
        (Need("lib.gone.Cache", "w"), "lib.gone.Cache is not there (w)"),
        (Need("lib.Cache", "w", has="usage pages"), "lib.Cache has no pages (w)"),
        (Need("lib.Cache", "w", has="pages|blocks"), "lib.Cache has no pages or blocks (w)"),
        (Need("lib.Cache", "w", calls=("gone()",)), "lib.Cache has no gone() (w)"),
        (Need("lib.Cache", "w", calls=("Cache(pages)",)), "lib.Cache has Cache() with parameters size, not pages (w)"),
        (
            Need("lib.Cache", "w", calls=("get(default, key)",)),
            "lib.Cache has get() with parameters key, default, not default, key (w)",
        ),
        (Need("lib.Cache", "w", calls=("get(key, other=...)",)), "lib.Cache has get() without a parameter other (w)"),
        (Need("lib.Cache", "w", calls=("put(key, value)",)), "lib.Cache has put() that also requires strict (w)"),
        (
            Need("lib.Cache", "w", replaces=("get(key)",)),
            "lib.Cache has get() with the further parameter default (w)",
        ),
        (
            Need("lib.Cache", "w", implements="shut"),
            "lib.Cache leaves drop abstract, which Headrace does not implement (w)",
        ),
        (Need("lib.load", "w", calls=("load(file)",)), "lib.load has load() with parameters path, mode, not file (w)"),
        (Need("lib.load", "w", since="1.0", calls=("load()",)), "lib.load has load() that also requires path (w)"),
    ],
)
def test_what_has_moved_is_named_with_the_reason(tmp_path: Path, need: Need, problem: str) -> None:
    assert list(moved([need], library(tmp_path))) == [problem]


@pytest.mark.parametrize(("number", "lines"), [("1.9.9", 0), ("1.10", 1), ("1.10.0rc1", 1), ("", 1)])
def test_older_releases_may_lack_what_they_do_without(tmp_path: Path, number: str, lines: int) -> None:
    need = Need("lib.Gone", "w", since="1.10")
    assert len(list(moved([need], library(tmp_path, number=number)))) == lines


def test_only_functions_that_do_something_else_are_to_be_read_again(tmp_path: Path) -> None:
    before, needs = library(tmp_path / "a"), [FITS, Need("lib.load", "it loads", follows="load")]
    same = MODULE.replace("'''Text.'''", "'''Another text.'''").replace("# a comment", "")
    assert list(rewritten(needs, before, library(tmp_path / "b", same))) == []
    other = MODULE.replace("return key", "return key or default").replace("return path", "return open(path)")
    get, load = rewritten(needs, before, library(tmp_path / "c", other, "2.0"))
    assert get.splitlines()[:2] == ["--- lib.Cache.get 1.0", "+++ lib.Cache.get 2.0"]
    assert "-    return path" in load.splitlines() and "+    return open(path)" in load.splitlines()


def test_the_installed_transformers_have_all_that_is_leant_on() -> None:
    assert list(of_transformers.lacking()) == []
