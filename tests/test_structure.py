"""The structure of the tree, over the syntax trees: layers of imports, circles, unique names, the layout page.

configs <- buffer <- rollout      configs <- buffer <- learner      rollout -> learner.weights only      all <- actors
Imports inside functions, under TYPE_CHECKING and by name count too. What docs/architecture.md and
docs/design/walks.md show is compared with the tree.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sizes import code_lines

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "buffer", "configs", "headrace", "learner", "rollout")

WIRE = {
    *("configs", "buffer.data", "buffer.problems", "buffer.curve"),
    *("buffer.keys", "buffer.wire"),
}
"""What the other processes may import of the buffer: the ledger and the store are its own."""
MAY: dict[str, set[str]] = {
    "configs": {"configs"},
    "configs.own_packages": {"configs.own_packages"},
    "headrace": {"headrace"},  # imported beside a user's own packages of our names
    "buffer": {"configs", "buffer"},
    "buffer.data.images": {"configs", "buffer.data.images"},
    "buffer.data.image_rows": {"configs", "buffer.data.images", "buffer.data.image_rows"},
    "buffer.data": {"configs", "buffer.data"},
    "buffer.problems": {"configs", "buffer.data", "buffer.problems"},
    "buffer.curve": {"configs", "buffer.keys", "buffer.curve"},
    "buffer.keys": {"buffer.keys"},
    "buffer.ledger": {"buffer.ledger"},
    "buffer.store": {"configs", "buffer.problems", "buffer.ledger", "buffer.store"},
    "buffer.resources": {"configs", "buffer.resources"},
    "buffer.wire": {*WIRE, "buffer.ledger", "buffer.store", "buffer.resources"},
    "buffer.transcript": {*WIRE, "buffer.transcript"},
    "buffer.dead_letters": {*WIRE, "buffer.ledger", "buffer.dead_letters"},
    "buffer.problem_list": {"configs", "buffer.ledger", "buffer.problem_list"},
    "buffer.inspect": {
        *WIRE,
        "buffer.ledger",
        "buffer.store",
        "buffer.transcript",
        "buffer.dead_letters",
        "buffer.problem_list",
        "buffer.inspect",
    },
    "learner": {*WIRE, "learner"},
    "learner.sft": {  # whose rows become texts as a rollout server's do, in the buffer's order
        *(*WIRE, "learner", "buffer.ledger.schedule", "buffer.store.lock"),
        *("rollout.templates", "rollout.episodes.prompts", "rollout.episodes.row_messages", "rollout.errors"),
    },
    "learner.weights": {*WIRE, "learner.weights"},  # rollout imports it: it must not bring the learner along
    "learner.algorithms": {"configs", "learner.algorithms"},
    "learner.saved.manifest": {"configs", "learner.saved.manifest"},
    "learner.model": {"configs", "learner.model", "learner.weights", "learner.algorithms", "learner.mesh"},
    "rollout": {*WIRE, "rollout", "learner.weights"},
    "actors": {"configs", "buffer", "learner", "rollout", "actors"},
    "actors.process": {"configs", "actors.process"},
    "actors.watch": {"configs", "buffer", "actors.process", "actors.watch"},
    "actors.report": {"configs", "buffer", "actors.process", "actors.watch", "actors.report"},
    "actors.live": {*("configs", "buffer", "actors.process"), *("actors.watch", "actors.report", "actors.live")},
    "actors.doctor": {
        *("configs", "buffer", "rollout", "actors.process", "actors.doctor"),
        *("learner.model.exactness", "learner.algorithms.own_trial"),  # in processes of their own, which import torch
    },
    "actors.doctor.forecast": {
        *("configs", "buffer", "actors.doctor", "learner.model", "learner.algorithms"),
        "learner.train.pictures",  # by price.py only where there is a card to estimate for: torch is slow to import
    },
    "actors.scaling": {"configs", "buffer", "actors.process", "actors.watch", "actors.scaling"},
    "actors.supervise": {
        *("configs", "buffer", "actors.process", "actors.watch", "actors.report", "actors.doctor", "actors.scaling"),
        *("actors.supervise", "learner.saved.manifest"),  # the learner's checkpoints, without torch
    },
}
"""The packages of Headrace that a package may import; the longest matching name holds."""

ONLY: dict[str, Callable[[str], bool]] = {
    "torch": lambda file: file.startswith(("learner/", "rollout/", "actors/")),
    "vllm": lambda file: file.startswith("rollout/engine/door/vllm_"),
    "ray": lambda file: file.startswith(("actors/supervise/ray_cluster.py", "actors/supervise/cluster/")),
    "pickle": lambda file: file == "learner/saved/shards.py",  # which refuses what could run a program
    **dict.fromkeys(("cloudpickle", "dill", "marshal", "shelve"), lambda file: False),
    # its connections and queues unpickle what they receive
    "multiprocessing": lambda file: file.startswith(("learner/certify/", "configs/entrypoint", "rollout/engine/early")),
}
"""Files that may import a library."""


def imports(source: str, file: str) -> Iterator[str]:
    """Dotted names that `source` imports, anywhere in it; `from a import b` gives `a.b`."""
    package = ".".join(Path(file).parent.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def module_of(file: str) -> str:
    """`buffer/wire/__init__.py` -> `buffer.wire`"""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def forbidden_imports(source: str, file: str) -> list[str]:
    """Imports of `file` that the rules forbid."""
    home = max((name for name in MAY if within(module_of(file), name)), key=len)
    found = []
    for name in imports(source, file):
        top = name.partition(".")[0]
        ours = top in PACKAGES and not any(within(name, allowed) for allowed in MAY[home])
        if ours or (top in ONLY and not ONLY[top](file)) or (top in PACKAGES and "__main__" in name.split(".")):
            found.append(f"{file} imports {name}")
    return found


def within(name: str, package: str) -> bool:
    """Whether `name` is `package` or lies in it."""
    return name == package or name.startswith(f"{package}.")


def files(packages: Iterable[str] = PACKAGES) -> list[str]:
    """Python files of `packages`, relative to the root."""
    return sorted(str(path.relative_to(ROOT)) for package in packages for path in (ROOT / package).rglob("*.py"))


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; empty where there is none."""
    modules = {module_of(file) for file in sources}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for file, source in sources.items():
        for name in imports(source, file):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != module_of(file):
                graph[module_of(file)].add(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def repeated(places: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that stand in more than one place."""
    where = defaultdict(list)
    for name, place in places:
        where[name].append(place)
    return {name: found for name, found in where.items() if len(found) > 1}


def tree_by_folder() -> dict[str, set[str]]:
    """Files of each folder of core with code in them: {"buffer/wire/": {"client.py", ...}, ...}"""
    folders = defaultdict(set)
    for file in files():
        path = Path(file)
        if path.name != "__init__.py" or code_lines(read(file)):
            folders[f"{path.parent}/"].add(path.name)
    return dict(folders)


def page_by_folder(page: str) -> dict[str, set[str]]:
    """The same from the page's first code block after `## 3. Layout`: a line is a folder, its files, and prose.

    A line that begins with a blank continues the folder above. Words that end with .py are files.
    """
    block = page.partition("## 3. Layout")[2].split("```")[1]
    folders: dict[str, set[str]] = {}
    folder = ""
    for line in block.splitlines():
        words = line.split()
        if words and not line[0].isspace():
            folder = words[0]
        if words and folder.split("/")[0] in PACKAGES:
            folders.setdefault(folder, set()).update(word for word in words if word.endswith(".py"))
    return folders


def walk(page: str, heading: str) -> list[tuple[str, list[str]]]:
    """(file, functions) of each line of the code block below `heading`: `path.py  function Class.method  prose`."""
    block = page.partition(f"## {heading}")[2].split("```")[1]
    lines = [re.split(r"\s{2,}", line, maxsplit=2) for line in block.splitlines() if line[:1].strip()]
    return [(file, functions.split()) for file, functions, _ in lines]


def functions_of(file: str) -> set[str]:
    """Functions of `file` by name, methods as `Class.method`; none if there is no such file."""
    if not (ROOT / file).is_file():
        return set()
    body = ast.parse(read(file)).body
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    methods = {
        f"{owner.name}.{node.name}"
        for owner in body
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, kinds)
    }
    return {node.name for node in body if isinstance(node, kinds)} | methods


@pytest.mark.parametrize("file", files())
def test_imports_go_one_way(file: str) -> None:
    assert forbidden_imports(read(file), file) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle({file: read(file) for file in files()}) == []


@pytest.mark.parametrize("file", files())
def test_a_cancellation_is_never_lost(file: str) -> None:
    """`asyncio.wait_for` loses one that comes with the answer, before Python 3.12: `asyncio.timeout` does not."""
    assert "asyncio.wait_for(" not in read(file)


@pytest.mark.parametrize("package", (*PACKAGES, "benchmarks", "examples"))
def test_a_class_name_is_one_thing_within_a_package(package: str) -> None:
    found = repeated(
        (node.name, file)
        for file in files((package,))
        for node in ast.walk(ast.parse(read(file)))
        if isinstance(node, ast.ClassDef)
    )
    assert found == {}


def test_the_layout_page_shows_the_tree() -> None:
    shown, there = page_by_folder(read("docs/architecture.md")), tree_by_folder()
    differences = {
        folder: (sorted(shown.get(folder, set()) - there.get(folder, set())), "only on the page",
                 sorted(there.get(folder, set()) - shown.get(folder, set())), "only in the tree")
        for folder in sorted({*shown, *there})
        if shown.get(folder) != there.get(folder)
    }  # fmt: skip
    assert differences == {}


@pytest.mark.parametrize("heading", ["One group", "One policy"])
def test_the_page_walks_through_functions_that_exist(heading: str) -> None:
    steps = walk(read("docs/design/walks.md"), heading)
    absent = [f"{file} {name}" for file, names in steps for name in names if name not in functions_of(file)]
    assert absent == []


def test_the_package_of_the_learner_is_light() -> None:
    """`import learner.weights` runs `learner/__init__.py` in a rollout server: it must not import the learner."""
    assert list(imports(read("learner/__init__.py"), "learner/__init__.py")) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("configs/load.py", "from buffer import ledger"),
        ("configs/load.py", "import torch"),
        ("buffer/store/sqlite.py", "def f():\n    import torch.distributed"),
        ("buffer/store/sqlite.py", "import rollout.loop"),
        ("buffer/store/sqlite.py", "from importlib import import_module\nimport_module('learner.loop')"),
        ("rollout/loop.py", "import vllm"),
        ("rollout/engine/vllm_engine.py", "from vllm import AsyncEngineArgs"),
        ("rollout/engine/door/leant_on.py", "def f():\n    import vllm"),
        ("rollout/tasks/tools.py", "if TYPE_CHECKING:\n    from vllm import LLM"),
        ("rollout/loop.py", "from learner import policy"),
        ("rollout/loop.py", "from learner.head import logprobs"),
        ("rollout/loop.py", "import learner"),
        ("rollout/loop.py", "import ray"),
        ("actors/supervise/one_machine.py", "def f():\n    import ray"),
        ("learner/model/policy.py", "async def f():\n    from vllm.config import X"),
        ("learner/model/policy.py", "from rollout.engine import Engine"),
        ("learner/model/policy.py", "from actors import keeper"),
        ("learner/weights/sender/publish.py", "from learner.policy import Policy"),
        ("learner/weights/sender/publish.py", "from ...policy import Policy"),
        ("learner/weights/sender/publish.py", "from ... import policy"),
        ("actors/watch/status.py", "import vllm"),
        ("buffer/store/sqlite.py", "import pickle"),
        ("rollout/cage/warden.py", "from multiprocessing.connection import Client"),
        ("buffer/ledger/rules.py", "from buffer.store.sqlite import Store"),
        ("buffer/ledger/rules.py", "import configs.schema"),
        ("buffer/store/sqlite.py", "from buffer.wire import protocol"),
        ("buffer/wire/server.py", "if TYPE_CHECKING:\n    from buffer import inspect"),
        ("buffer/inspect.py", "from buffer.__main__ import restored"),
        ("rollout/loop.py", "from buffer.ledger.rules import Ledger"),
        ("learner/loop.py", "from buffer.store import sqlite"),
        ("learner/model/policy.py", "from learner.train.batch import Microbatch"),
        ("learner/algorithms/losses.py", "from learner.train import step"),
        ("actors/process.py", "from actors.supervise.keeper import Keeper"),
        ("actors/watch/status.py", "from actors.supervise import launch"),
    ],
)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    assert len(forbidden_imports(source, file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("configs/load.py", "import yaml\nfrom configs.schema import Config\nfrom . import keys"),
        ("buffer/store/sqlite.py", "import numpy, buffers, torchless\nfrom configs import load"),
        ("rollout/engine/door/vllm_client.py", "from vllm import AsyncEngineArgs\nimport torch"),
        (
            "rollout/loop.py",
            "from learner.weights.receiver import Receiver\nfrom learner import weights\nfrom .engine import Engine",
        ),
        (
            "learner/weights/sender/publish.py",
            "from .plan import Plan\nimport torch\nfrom buffer.wire.protocol import Array",
        ),
        ("learner/loop.py", "from learner.weights import sender"),
        ("buffer/inspect.py", "from buffer.store import sqlite\nfrom buffer.wire.client import Connection"),
        ("buffer/__main__.py", "from buffer import inspect\nfrom buffer.ledger.rules import Ledger"),
        ("rollout/engine/door/vllm_worker.py", "from vllm.config import VllmConfig"),
        ("learner/train/step.py", "from learner.model import policy\nfrom learner.algorithms import LOSSES"),
        (
            "actors/supervise/ray_cluster.py",
            "import ray\nfrom actors.watch.display import Display\nimport buffer.wire.client",
        ),
    ],
)
def test_an_allowed_import_is_not(file: str, source: str) -> None:
    assert forbidden_imports(source, file) == []


def test_circles_are_found_wherever_the_import_stands() -> None:
    circular = {"a/b.py": "def f():\n    from a import c", "a/c.py": "if TYPE_CHECKING:\n    from a.d import X"}
    assert circle(circular | {"a/d.py": ""}) == []
    found = circle(circular | {"a/d.py": "import a.b"})
    assert found[0] == found[-1]
    assert set(found) == {"a.b", "a.c", "a.d"}
    package = {"a/__init__.py": "from a.b import X", "a/b.py": "from a.c import Y", "a/c.py": ""}
    assert circle(package) == []
    assert circle(package | {"a/c.py": "from a import X"}) != []


def test_the_layout_page_is_read_line_by_line() -> None:
    page = "x\n```\nno/ a.py\n```\n## 3. Layout\n```\nbuffer/wire/  a.py b.py  words\n   c.py  more\ntests/ d.py\n```\n"
    assert page_by_folder(page) == {"buffer/wire/": {"a.py", "b.py", "c.py"}}
