"""A library's source, read without importing it: from a folder and from a wheel."""

import zipfile
from pathlib import Path

import pytest

from configs.releases.source import Parameters, Source

LIBRARY = {
    "lib/__init__.py": "from .core import Cache as Store\nfrom lib.other import helper\n",
    "lib/core/__init__.py": "from lib.core.cache import Cache\n",
    "lib/core/cache.py": """
from typing import ClassVar
from abc import abstractmethod
from ..base import Base
raise RuntimeError("never imported")
TABLE: dict[str, int] = {"a": 1}
class Cache(Base["x"]):
    kind: ClassVar[str] = "c"
    def __init__(self, size, *, strict=False): self.size, self.strict = size, strict
    def get(self, key, default=None): self.hits += 1
    @property
    def usage(self): return 0
    @abstractmethod
    def drop(self, key): ...
    def shut(self): ...
Cache.get.fast = True
class Record:
    name: str
    size: int = 0
""",
    "lib/base.py": """
from abc import ABC, abstractmethod
if True:
    class Base(ABC):
        @abstractmethod
        def shut(self): ...
        @classmethod
        def make(cls, a, /, b, *more, c, **named): ...
        @staticmethod
        def plain(self_like): ...
""",
}


@pytest.fixture(params=["folder", "wheel"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    if request.param == "wheel":
        with zipfile.ZipFile(tmp_path / "lib-2.1.0-py3-none-any.whl", "w") as wheel:
            for name, text in LIBRARY.items():
                wheel.writestr(name, text)
        return Source.of_wheel(tmp_path / "lib-2.1.0-py3-none-any.whl", "lib")
    for name, text in LIBRARY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Source(tmp_path, "lib", "2.1.0")


def test_names_are_found_where_they_are_defined_and_where_they_are_imported(source: Source) -> None:
    assert source.number == "2.1.0"
    for path in ("lib.core.cache.Cache", "lib.core.Cache", "lib.Store", "lib.core.cache.Cache.get", "lib.base"):
        assert source.find(path) is not None, path
    assert source.find("lib.Store") == source.find("lib.core.cache.Cache")
    for path in ("lib.Cache", "lib.core.cache.Absent", "lib.core.cache.Cache.absent", "lib.absent", "lib.helper"):
        assert source.find(path) is None, path


def test_a_class_has_what_its_body_its_methods_and_its_bases_have(source: Source) -> None:
    cache = source.find("lib.Store")
    assert cache is not None
    assert {"kind", "size", "strict", "hits", "get", "usage", "make", "shut"} <= source.attributes(cache)
    assert "fast" not in source.attributes(cache)
    assert source.abstract_methods(cache) == {"drop"}


def taken(places: str, named: str = "", required: str = "") -> Parameters:
    """Parameters without `*args` and `**kwargs`."""
    by_place = tuple(places.split())
    return Parameters(by_place, frozenset({*by_place, *named.split()}), frozenset(required.split()), False, False)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("lib.Store", taken("size", named="strict", required="size")),
        (
            "lib.Store.get",
            taken("key default", required="key"),
        ),
        ("lib.Store.make", Parameters(("a", "b"), frozenset("abc"), frozenset("abc"), True, True)),
        (
            "lib.Store.plain",
            taken("self_like", required="self_like"),
        ),
        (
            "lib.core.cache.Record",
            taken("name size", required="name"),
        ),
        ("lib.core.cache.TABLE", None),
    ],
)
def test_parameters_are_those_of_a_call(source: Source, path: str, expected: Parameters | None) -> None:
    found = source.find(path)
    assert found is not None
    assert source.parameters(found) == expected


def test_what_is_no_wheel_of_the_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_text("x")
    with pytest.raises(ValueError, match=r"a\.whl: not a wheel"):
        Source.of_wheel(tmp_path / "a.whl", "lib")
    with zipfile.ZipFile(tmp_path / "b-1.whl", "w") as wheel:
        wheel.writestr("other/__init__.py", "")
    with pytest.raises(ValueError, match="has no package lib"):
        Source.of_wheel(tmp_path / "b-1.whl", "lib")


def test_an_installed_package_is_found_by_its_distribution_without_importing_it() -> None:
    assert Source.installed("no_such_package") is None
    found = Source.installed("hypothesis", "no-such-distribution", "hypothesis")
    assert found is not None and found.number.count(".") >= 1
    assert found.find("hypothesis.given") is not None
