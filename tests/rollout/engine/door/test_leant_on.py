"""The table of what Headrace leans on in vLLM: true of the installed release, and whole."""

import array
import ast
import asyncio
import gc
import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.releases.needs import Need
from configs.releases.source import Source, attributes_of
from rollout.engine.door import leant_on

ROOT = Path(__file__).parents[4]
DOOR = ROOT / "rollout" / "engine" / "door"
HOLDERS = (
    *("vllm_engine.py", "joined_requests.py", "worker.py", "model_load.py", "image_input.py", "chat_parser.py"),
    "teacher_scores.py",
    *("recorded_copies.py", "scheduling/scheduler.py", "scheduling/plain_steps.py", "scheduling/record.py"),
    *("lora/adapter_load.py", "experts/expert_kernels.py"),
)
"""Files that hold objects of vLLM."""
PLAIN = (
    *(object, list, dict, set, str, bytes, bytearray, Path, array.array, np.ndarray, torch.Tensor, torch.nn.Module),
    *(torch, np, asyncio, asyncio.Future, asyncio.Task, os, logging, logging.Logger, itertools, time, gc, signal),
)
"""What has the attributes that are not vLLM's."""
FURTHER = {
    *("ascii_letters", "co_names", "current_stream", "enter_context", "get_tensor", "record_event", "set_stance"),
    *("setter", "to_dict", "Scalar", "_schema", "is_mutable", "is_view", "errors", "Module", "tie_word_embeddings"),
    "engine_client",
}
"""Attributes of others: Python's, torch's, safetensors', transformers'. `engine_client` is what vLLM's `init_app_state`
sets."""


def named(need: Need) -> Iterator[str]:
    """Attributes that an entry of the table names."""
    for word in need.has.split():
        yield from word.rstrip("?").split("|")
    yield from (form.partition("(")[0] for form in (*need.calls, *need.replaces))


def own_names() -> Iterator[str]:
    """Names that Headrace's own files define."""
    for package in ("actors", "buffer", "configs", "learner", "rollout"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield node.name
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    yield node.target.id
                elif isinstance(node, ast.Assign):
                    yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def read_attributes(source: str) -> Iterator[str]:
    """Attributes that a file reads or sets, also by `getattr`. Names with `rl_` are Headrace's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not node.attr.startswith(("rl_", "__")):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            yield from (str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant))


def own_attributes(source: str) -> Iterator[str]:
    """Attributes that the classes of a file set on themselves, unless they are subclasses of vLLM's schedulers."""
    for owner in ast.walk(ast.parse(source)):
        if isinstance(owner, ast.ClassDef) and not any("Scheduler" in ast.unparse(base) for base in owner.bases):
            yield from attributes_of(owner)


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Attributes that are in the table, or not vLLM's."""
    table = {name for need in leant_on.NEEDS for name in named(need)}
    reports = own_attributes((ROOT / "rollout" / "engine" / "scheduling" / "scheduler.py").read_text(encoding="utf-8"))
    return table | {*reports} | {*own_names()} | {name for each in PLAIN for name in dir(each)} | FURTHER


def test_the_installed_vllm_has_all_that_is_leant_on() -> None:
    assert list(leant_on.moved()) == []
    assert leant_on.lacking() is leant_on.lacking(), "a second look reads no file"


@pytest.mark.parametrize("file", HOLDERS)
def test_what_a_file_reads_of_vllms_objects_is_in_the_table(file: str, known: set[str]) -> None:
    source = (ROOT / "rollout" / "engine" / file).read_text(encoding="utf-8")
    assert sorted(set(read_attributes(source)) - known - {*own_attributes(source)}) == []


def test_an_attribute_that_is_not_in_the_table_is_found(known: set[str]) -> None:
    source = "def f(request):\n    request.brand_new = getattr(request, 'also_new')\n    return request.num_tokens"
    assert set(read_attributes(source)) - known == {"brand_new", "also_new"}


def test_every_import_of_vllm_is_in_the_table() -> None:
    """And has its home there, so that a release is judged where it is imported from."""
    table = {need.path for need in leant_on.NEEDS}
    imported = {
        f"{node.module}.{alias.name}"
        for file in DOOR.glob("vllm_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    assert imported - table == {"vllm.platforms.current_platform"}  # `Platform` stands for it


@pytest.mark.parametrize("file", sorted(set((ROOT / "rollout").rglob("*.py")) - set(DOOR.glob("*.py"))))
def test_no_other_file_names_a_module_of_vllm(file: Path) -> None:
    texts = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
    assert [text for text in texts if isinstance(text, str) and text.startswith("vllm.")] == []


def test_all_that_vllm_leaves_abstract_is_implemented() -> None:
    from rollout.engine.scheduling.scheduler import Reports
    from rollout.engine.worker import StampedOutput

    ours = {"AsyncModelRunnerOutput": StampedOutput, "StatLoggerBase": Reports}
    for need in leant_on.NEEDS:
        if need.implements:
            made = ours.pop(need.path.rpartition(".")[2])
            assert {name.rstrip("?") for name in need.implements.split()} <= vars(made).keys()
    assert ours == {}


def test_a_moved_symbol_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("")
    lacking = leant_on.lacking_in(Source(tmp_path, "vllm", "0.40.0"))
    monkeypatch.setattr(leant_on, "lacking", lambda: lacking)
    lines = list(leant_on.moved())
    assert len(lines) == len(leant_on.NEEDS)
    why = "only running requests take part in plain steps"
    line = f"vllm 0.40.0: vllm.v1.request.RequestStatus is not there ({why}); install a vLLM that was run, 0.26 to 0.32"
    assert line in lines
