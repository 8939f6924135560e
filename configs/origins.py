"""Keeps credentials and values from environment variables out of what a run writes.

Each process resolves `${oc.env:KEY}` at its start, so a rotated key needs no change. A credential in plain text is
recognised by its key, stands in `config.yaml` only, and is MASK elsewhere.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from configs.help import TYPES, key_of, keys
from configs.plain_text import conceal, without_credentials
from configs.schema import Config

Place = tuple[int | str, ...]
MASK = "********"
CREDENTIAL = re.compile(
    r"(^|_)(api_?keys?|(access|secret|private|signing|encryption)_?key|secret|passw(or)?d|passphrase|credentials?|"
    r"authorization|bearer|(hf|hub|auth|access|refresh|bearer|api|github|wandb|session)_?token)$|^token$"
)
"""Names are in small letters with underscores."""
SHORTEST, SHORTEST_GUESSED = 6, 16
"""Fewest characters of a replaced value: from a variable, and by its key's name. A shorter value would hide parts of
other words."""
DIGEST = re.compile(r" sha256:([0-9a-f]{16})$")
LISTED = ("rollout.agent.command",)
_RESOLVING: ContextVar["Resolving | None"] = ContextVar("resolving", default=None)


class Origin(NamedTuple):
    """Example: `Origin("Bearer ${oc.env:KEY}", "Bearer 123", ("KEY",))`"""

    text: str
    value: Any
    variables: tuple[str, ...]


class Resolving:
    """One value that is being resolved: from which variables, `seen`, and which of them were `missing`."""

    def __init__(self, environment: Mapping[str, str], lenient: bool) -> None:
        self.environment, self.lenient = environment, lenient
        self.seen: list[str] = []
        self.missing: list[str] = []


class MissingVariable(Exception):
    """Arguments: key and variable."""


def _variable(name: str, *default: Any) -> Any:
    now = _RESOLVING.get() or Resolving(os.environ, False)
    now.seen.append(name)
    if name in now.environment:
        return now.environment[name]
    if default:
        return None if default[0] is None else str(default[0])
    if now.lenient:
        now.missing.append(name)
        return MASK
    raise KeyError(f"Environment variable '{name}' not found")


OmegaConf.register_resolver("oc.env", _variable, replace=True, annotation_validation="off")


def resolved(
    tree: Mapping[str, Any], environment: Mapping[str, str], lenient: bool = False
) -> tuple[Any, dict[Place, Origin]]:
    """The `tree` with interpolations replaced, and the origins of values. `lenient`: MASK a credential whose variable
    is missing."""
    whole = OmegaConf.create(deepcopy(dict(tree)))
    token = _RESOLVING.set(Resolving(environment, lenient))
    try:
        found: Any = OmegaConf.to_container(whole, resolve=True)
        origins = dict[Place, Origin]()
        for place, text in leaves(tree):
            if isinstance(text, str) and "${" in text:
                _RESOLVING.set(now := Resolving(environment, lenient))
                node: Any = whole
                for part in place:
                    node = node[part]
                value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
                if now.missing and not may_hold_credentials(place):
                    raise MissingVariable(".".join(map(str, place)), now.missing[0])
                if now.seen:
                    origins[place] = Origin(text, value, tuple(dict.fromkeys(now.seen)))
        return found, origins
    finally:
        _RESOLVING.reset(token)


def traced(config: Config, origins: Mapping[Place, Origin], environment: Mapping[str, str]) -> Config:
    """Keep `origins`, and have `visible` hide the credentials."""
    tree = config.model_dump(mode="json") if origins else {}
    config._origins.update(
        {place: each._replace(value=at(tree, place)) for place, each in origins.items() if has(tree, place)}
    )
    for place, origin in config._origins.items():
        if may_hold_credentials(place):
            conceal({text: origin.text for text in texts(origin.value) if len(text) >= SHORTEST})
    named = {name: value for name, value in environment.items() if is_credential(name)}
    named |= {name: environment[name] for name in _named_variables(config) if name in environment}
    conceal({value: f"${{oc.env:{name}}}" for name, value in named.items() if len(value) >= SHORTEST_GUESSED})
    conceal({value: MASK for _, value in credentials(config) if len(value) >= SHORTEST_GUESSED})
    return config


def _named_variables(config: Config) -> Iterator[str]:
    for part in config.reward.parts:
        yield from (value for key, value in part.kwargs.items() if key.endswith("_env") and isinstance(value, str))
    yield from (each.api_key_env for each in config.teacher.teachers.values() if each.api_key_env)


def variables(config: Config) -> list[str]:
    """Environment variables that the run file names."""
    named = (name for origin in config._origins.values() for name in origin.variables)
    return list(dict.fromkeys([*named, *_named_variables(config)]))


def written(config: Config, literal: Callable[[str], str] = str) -> dict[str, Any]:
    """All keys for `config.yaml`; `literal` changes texts that are no interpolations."""
    tree: dict[str, Any] = mapped(config.model_dump(mode="json"), literal)
    for place, origin in _kept(config):
        put(tree, place, origin.text)
    return tree


def disclosed(config: Config) -> dict[str, Any]:
    """All keys for page, report and trackers."""
    tree: dict[str, Any] = masked(config.model_dump(mode="json"))
    for place, origin in _kept(config):
        put(tree, place, origin.text)
    return tree


def shared(config: Config) -> str:
    """The config as JSON for another machine, which has no credentials to make a run of it."""
    tree = masked(config.model_dump(mode="json"))
    for place, _ in _kept(config):
        if may_hold_credentials(place):
            value = at(tree, place)
            put(tree, place, MASK if isinstance(value, str) else type(value)())
    return json.dumps(tree)


def recorded(config: Config, exclude_defaults: bool = False) -> dict[str, Any]:
    """All keys for ledger and fingerprint. A value from a variable that can be no credential has a digest behind it, so
    that another value is a change."""
    plain = config.model_dump(mode="json", exclude_defaults=exclude_defaults)
    tree: dict[str, Any] = masked(plain)
    for place, origin in _kept(config):
        if has(tree, place):
            secret = may_hold_credentials(place)
            put(tree, place, origin.text if secret else f"{origin.text} sha256:{digest(at(plain, place))}")
    return tree


def comparable(key: str, known: Any, now: Any, config: Config) -> tuple[Any, Any]:
    """Make both values equal if no setting has changed: earlier releases recorded the values themselves, and
    credentials may be rotated."""
    known = masked({key.rpartition(".")[2]: known})[key.rpartition(".")[2]]
    below = tuple(key.split("."))
    for place, origin in _kept(config):
        inner = place[len(below) :]
        if place[: len(below)] == below and may_hold_credentials(place):
            known = origin.text if not inner else put(deepcopy(known), inner, origin.text, only=True)
    for one, other in ((known, now), (now, known)):
        if isinstance(one, str) and (found := DIGEST.search(one)):
            same = (DIGEST.search(other) if isinstance(other, str) else None) or None
            if found[1] == (same[1] if same else digest(other)):
                return now, now
    return known, now


def _kept(config: Config) -> Iterator[tuple[Place, Origin]]:
    """The launcher may have replaced a value, such as an address."""
    tree = config.model_dump(mode="json") if config._origins else {}
    for place, origin in config._origins.items():
        if has(tree, place) and at(tree, place) == origin.value:
            yield place, origin


def may_hold_credentials(place: Place) -> bool:
    """Whether the key takes any text: a map of arguments, or a command line."""
    name = key_of(place)
    return name in LISTED or (name in keys() and keys()[name].type == TYPES["object"])


def is_credential(name: Any) -> bool:
    return isinstance(name, str) and bool(CREDENTIAL.search(name.strip("-").lower().replace("-", "_")))


def credentials(config: Config) -> Iterator[tuple[Place, str]]:
    tree, masks = config.model_dump(mode="json"), disclosed(config)
    for place, value in leaves(tree):
        if value != (shown := at(masks, place) if has(masks, place) else value) and MASK in str(shown):
            yield place, value


def masked(tree: Any) -> Any:
    """Mask credentials by the names of keys or options, and in URLs."""
    if isinstance(tree, dict):
        return {
            key: MASK if is_credential(key) and isinstance(value, str) and value else masked(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        shown = [masked(value) for value in tree]
        for number, value in enumerate(tree):
            if not isinstance(value, str) or not value.startswith("-"):
                continue
            option, equals, _ = value.partition("=")
            if is_credential(option) and equals:
                shown[number] = f"{option}={MASK}"
            elif is_credential(option) and number + 1 < len(tree) and isinstance(tree[number + 1], str):
                shown[number + 1] = MASK
        return shown
    return without_credentials(tree) if isinstance(tree, str) else tree


def digest(value: Any) -> str:
    """16 hex digits over a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def leaves(tree: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    if isinstance(tree, dict | list) and tree:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*place, key))
    else:
        yield place, tree


def texts(value: Any) -> Iterator[str]:
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, str))


def mapped(tree: Any, change: Callable[[str], str]) -> Any:
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [mapped(value, change) for value in tree]
    return change(tree) if isinstance(tree, str) else tree


def has(tree: Any, place: Sequence[int | str]) -> bool:
    for part in place:
        inside = part in tree if isinstance(tree, dict) else isinstance(tree, list) and part in range(len(tree))
        if not inside:
            return False
        tree = tree[part]
    return True


def at(tree: Any, place: Sequence[int | str]) -> Any:
    for part in place:
        tree = tree[part]
    return tree


def put(tree: Any, place: Place, value: Any, only: bool = False) -> Any:
    """Put `value` at `place` of `tree`; `only`: if something is there."""
    if not only or has(tree, place):
        at(tree, place[:-1])[place[-1]] = value
    return tree
