"""Facts of the installed vLLM, read from its source: importing it takes ten seconds."""

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from configs.releases.source import statements
from rollout.engine.door.leant_on import installed


def vllm_fields() -> Iterator[str]:
    source = installed()
    found = source.find("vllm.engine.arg_utils.AsyncEngineArgs") if source is not None else None
    if source is not None and found is not None:
        yield from source.fields(found)


def registered(package: str, table: str) -> Iterator[str]:
    node = definition(f"vllm.{package}.{table}")
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
        yield from (str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))


def cpu_head_sizes() -> Iterator[int]:
    node = definition("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend.get_supported_head_sizes")
    for line in statements(node) if node is not None else ():
        if isinstance(line, ast.Return) and isinstance(line.value, ast.List):
            yield from (each.value for each in line.value.elts if isinstance(each, ast.Constant))  # type: ignore[misc]


def attention_of_cohere() -> ast.AST | None:
    """The attention of Cohere's models, which makes windows of its own; None without vLLM."""
    return definition("vllm.model_executor.models.commandr.CohereAttention")


def definition(path: str) -> ast.AST | None:
    """Find a definition; None if it or vLLM is missing."""
    source = installed()
    found = source.find(path) if source is not None else None
    return found.node if found is not None else None


def variable_readers() -> dict[str, Callable[[], object]]:
    """Runs only vLLM's `envs.py`, a tenth of a second."""
    source = installed()
    if source is None:
        return {}
    spec = importlib.util.spec_from_file_location("vllm_envs_alone", Path(str(source.root)) / "vllm" / "envs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a reader looks up its own module
    spec.loader.exec_module(module)
    readers: dict[str, Callable[[], object]] = module.environment_variables
    return readers
