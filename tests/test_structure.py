"""The direction of imports, over the syntax trees of all files, imports inside functions and by name included.

configs <- buffer <- rollout      configs <- buffer <- learner      rollout -> learner.weights only      all <- actors
buffer and configs never import torch; vLLM is imported in rollout/engine/vllm_engine.py and rollout/engine/worker.py only
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "buffer", "learner", "rollout", "actors")

MAY = {
    "configs": {"configs"},
    "buffer": {"configs", "buffer"},
    "learner.weights": {
        "configs",
        "buffer",
        "learner.weights",
    },  # rollout imports it: it must not bring the learner along
    "learner": {"configs", "buffer", "learner"},
    "rollout": {"configs", "buffer", "rollout", "learner.weights"},
    "actors": {"configs", "buffer", "learner", "rollout", "actors"},
}
"""What each package may import of ours; the most exact name holds."""

ONLY: dict[str, Callable[[str], bool]] = {
    "torch": lambda file: file.startswith(("learner/", "rollout/", "actors/")),
    "vllm": lambda file: file.startswith("rollout/engine/"),
    "ray": lambda file: file.startswith("actors/"),
    "pickle": lambda file: False,
}
"""Where a library may be imported."""


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


def wrong(source: str, file: str) -> list[str]:
    """Imports of `file` that the rules forbid."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    home = max((name for name in MAY if within(module, name)), key=len)
    found = []
    for name in imports(source, file):
        top = name.partition(".")[0]
        ours = top in PACKAGES and not any(within(name, allowed) for allowed in MAY[home])
        if ours or (top in ONLY and not ONLY[top](file)):
            found.append(f"{file} imports {name}")
    return found


def within(name: str, package: str) -> bool:
    """Whether `name` is `package` or lies in it."""
    return name == package or name.startswith(f"{package}.")


def files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("file", files())
def test_imports_go_one_way(file: str) -> None:
    assert wrong((ROOT / file).read_text(encoding="utf-8"), file) == []


def test_the_package_of_the_learner_is_light() -> None:
    """`import learner.weights` runs `learner/__init__.py` in a rollout server: it must not import the learner."""
    assert list(imports((ROOT / "learner" / "__init__.py").read_text(encoding="utf-8"), "learner/__init__.py")) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("configs/load.py", "from buffer import ledger"),
        ("configs/load.py", "import torch"),
        ("buffer/store/sqlite.py", "def f():\n    import torch.distributed"),
        ("buffer/store/sqlite.py", "import rollout.loop"),
        ("buffer/store/sqlite.py", "from importlib import import_module\nimport_module('learner.loop')"),
        ("rollout/loop.py", "import vllm"),
        ("rollout/tasks/tools.py", "if TYPE_CHECKING:\n    from vllm import LLM"),
        ("rollout/loop.py", "from learner import policy"),
        ("rollout/loop.py", "from learner.head import logprobs"),
        ("rollout/loop.py", "import learner"),
        ("rollout/loop.py", "import ray"),
        ("learner/model/policy.py", "async def f():\n    from vllm.config import X"),
        ("learner/model/policy.py", "from rollout.engine import Engine"),
        ("learner/model/policy.py", "from actors import keeper"),
        ("learner/weights/sender/publish.py", "from learner.policy import Policy"),
        ("learner/weights/sender/publish.py", "from ..policy import Policy"),
        ("learner/weights/sender/publish.py", "from .. import policy"),
        ("actors/watch/status.py", "import vllm"),
        ("buffer/store/sqlite.py", "import pickle"),
    ],
)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    assert len(wrong(source, file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("configs/load.py", "import yaml\nfrom configs.schema import Config\nfrom . import keys"),
        ("buffer/store/sqlite.py", "import numpy, buffers, torchless\nfrom configs import load"),
        ("rollout/engine/vllm_engine.py", "from vllm import AsyncEngineArgs\nimport torch"),
        (
            "rollout/loop.py",
            "from learner.weights.receiver import Receiver\nfrom learner import weights\nfrom .engine import Engine",
        ),
        (
            "learner/weights/sender/publish.py",
            "from .plan import Plan\nimport torch\nfrom buffer.protocol import Array",
        ),
        ("learner/loop.py", "from learner.weights import sender"),
        (
            "actors/supervise/launch.py",
            "import ray\nfrom learner import loop\nfrom rollout import loop as other\nimport buffer.client",
        ),
    ],
)
def test_an_allowed_import_is_not(file: str, source: str) -> None:
    assert wrong(source, file) == []
