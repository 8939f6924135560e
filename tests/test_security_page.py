"""docs/security.md: each statement has a number, each number a test, and each test is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from actors.live import serve
from actors.supervise.launch import processes
from buffer.curve import is_loopback
from configs.load import load
from configs.schema import BufferConfig, Config

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
TEXT, _, TABLE = PAGE.partition("## Tests")
ROWS = re.findall(r"^\| (\d+) \| (.+) \|$", TABLE, re.MULTILINE)


def test_each_statement_has_a_row_and_each_row_a_statement() -> None:
    said = [int(number) for number in re.findall(r"\((\d+)\)$", TEXT, re.MULTILINE)]
    assert sorted({*said}) == [int(number) for number, _ in ROWS] == list(range(1, len(ROWS) + 1))


def test_each_statement_of_a_list_is_numbered() -> None:
    lines = re.sub(r"\n  +", " ", TEXT).splitlines()
    assert [line for line in lines if line.startswith("- ") and not re.search(r"\. \(\d+\)$", line)] == []


@pytest.mark.parametrize("number", [number for number, _ in ROWS])
def test_the_tests_of_a_statement_are_there(number: str) -> None:
    names = re.findall(r"`(\S+)::(\w+)`", dict(ROWS)[number])
    assert names, "a statement without a test"
    for file, name in names:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_a_run_listens_on_loopback_by_default() -> None:
    assert is_loopback(BufferConfig().address) and serve.HOST == "127.0.0.1"
    hosts = [each.model_fields["host"].default for each in sections(Config) if "host" in each.model_fields]
    assert len(hosts) >= 4 and {*hosts} == {"127.0.0.1"}, "weights, rewards, teachers, chat"


def sections(kind: Any) -> Iterator[type[BaseModel]]:
    """All models within the annotation `kind`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    inner = [field.annotation for field in kind.model_fields.values()] if hasattr(kind, "model_fields") else []
    for each in (*inner, *get_args(kind)):
        yield from sections(each)


def test_a_process_on_a_cluster_gets_the_variables_of_the_run_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECURITY_PAGE_KEY", "key-0815")
    monkeypatch.setenv("SECURITY_PAGE_JUDGE", "key-4711")
    monkeypatch.setenv("SECURITY_PAGE_OTHER", "other")
    words = ["--model.path=m", "--data.train=d", "--reward.function=judge", "--cluster.address=10.0.0.1:6379"]
    kwargs = "{a: '${oc.env:SECURITY_PAGE_KEY}', api_key_env: SECURITY_PAGE_JUDGE}"
    for process in processes(load([*words, f"--reward.kwargs={kwargs}"])):
        given = {name: value for name, value in process.env.items() if name.startswith("SECURITY_PAGE")}
        assert given == {"SECURITY_PAGE_KEY": "key-0815", "SECURITY_PAGE_JUDGE": "key-4711"}
        assert "key-0815" not in repr(process) and "${oc.env:SECURITY_PAGE_KEY}" in process.concealed.values()
