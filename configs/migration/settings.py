"""Reads another system's settings into a flat dict, `{"data.train_batch_size": 1024, ...}`, and runs nothing."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from configs.load import ConfigError

ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S.*)$")
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?[-=]((?:[^{}]|\$\{[^{}]*\})*))?\}|([A-Za-z_]\w*))")
"""`$NAME`, `${NAME}`, and with a default `${NAME:-1024}`."""
ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
OVERRIDE = re.compile(r"^[+]{0,2}([A-Za-z_]\w*(?:\.\w+)*)=(.*)$", re.S)
CALLS = ("GRPOConfig", "ModelConfig", "LoraConfig", "GRPOTrainer", "load_dataset")
"""Calls whose literal arguments are settings."""
RENAMED = {"r": "lora_r", "target_modules": "lora_target_modules", "model": "model_name_or_path"}
Settings = dict[str, Any]


def read_settings(file: Path) -> Settings:
    """The settings in `file`. The suffix decides: `.yaml`, `.yml`, `.json`; `.py`; else a shell script."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read as text: {error}"
        raise ConfigError([f"--from: {file}: {why}"]) from None
    readers = {".yaml": from_yaml, ".yml": from_yaml, ".json": from_yaml, ".py": from_python}
    found = readers.get(file.suffix, from_shell)(text, file)
    if not found:
        remedy = "name a YAML file, or the shell or Python script that starts the training"
        raise ConfigError([f"--from: {file}: no settings are in it; {remedy}"])
    return found


def from_yaml(text: str, file: Path) -> Settings:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"--from: {file}: not YAML: {' '.join(str(error).split())}"]) from None
    return dict(_flat(tree)) if isinstance(tree, dict) else {}


def _flat(tree: dict[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", number(value)


def from_shell(text: str, file: Path) -> Settings:
    """Variables that the script does not set stay as `${oc.env:NAME}`."""
    lines = re.sub(r"\\\r?\n", " ", text).splitlines()
    variables: dict[str, str] = {}
    found: Settings = {}
    for line in lines:
        line = ARITHMETIC.sub(lambda match: _computed(match, variables), line)
        assigned = ASSIGNMENT.match(line)
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError([f"--from: {file}: not a shell command: {error}: {line.strip()[:60]}"]) from None
        if assigned and len(words) <= 2:
            variables[assigned[1]] = _substituted(words[-1].partition("=")[2], variables)
        else:
            found |= _words([_substituted(word, variables) for word in words])
    return found


def _words(words: list[str]) -> Settings:
    found: Settings = {}
    for place, word in enumerate(words):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else _values(words[place + 1 :])
            found[name] = (
                [number(each) for each in values] if len(values) > 1 else number(values[0]) if values else True
            )
        elif matched := OVERRIDE.match(word):
            found[matched[1]] = _hydra(matched[2])
    return found


def _values(rest: list[str]) -> list[str]:
    end = next((place for place, word in enumerate(rest) if word.startswith("--")), len(rest))
    return rest[:end]


def _substituted(word: str, variables: dict[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        unset = f"${{oc.env:{name}}}" if default is None else _substituted(default, variables)
        return variables.get(name, unset)

    return VARIABLE.sub(one, word)


def _computed(match: re.Match[str], variables: dict[str, str]) -> str:
    text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: variables.get(name[1], name[0]), match[1])
    try:
        return str(_whole(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return match[0]


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and (compute := OPERATORS.get(type(node.op))):
        return compute(_whole(node.left), _whole(node.right))
    raise ValueError(ast.unparse(node))


def _hydra(text: str) -> Any:
    """`['a','b']` or `[a,b]`"""
    if text.startswith("["):
        return [number(each.strip().strip("'\"")) for each in text.strip("[]").split(",") if each.strip()]
    return number(text)


def number(value: Any) -> Any:
    """YAML leaves `1e-6` text."""
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False, "null": None, "none": None}
    if value.lower() in words:
        return words[value.lower()]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def from_python(text: str, file: Path) -> Settings:
    """Literal arguments of TRL's calls in a script, which is parsed and never run."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError([f"--from: {file}:{error.lineno}: not Python: {error.msg}"]) from None
    found: Settings = {}
    for node in ast.walk(tree):
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in CALLS:
            found |= dict(_arguments(node, name))
    return found


def _arguments(call: ast.Call, name: str) -> Iterator[tuple[str, Any]]:
    if name == "load_dataset" and call.args and isinstance(call.args[0], ast.Constant):
        yield "dataset_name", call.args[0].value
    for keyword in call.keywords:
        key = RENAMED.get(keyword.arg or "", keyword.arg or "")
        if name == "load_dataset":
            key = {"split": "dataset_train_split", "name": "dataset_config"}.get(key, "")
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError:
            value = keyword.value.id if isinstance(keyword.value, ast.Name) and key == "reward_funcs" else None
        if key and value is not None:
            yield key, value
