"""Whether the hub of models answers within seconds: its client tries for half a minute to connect."""

import os
import socket
import threading
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from configs.schema import Config

HUB = "https://huggingface.co"
PORTS = {"http": 80, "https": 443}
REACH_S = 3.0
OFFLINE = "HF_HUB_OFFLINE"
"""The hub's client reads it at import, and then takes only local files."""
SKIPPED = "HEADRACE_HUB_SKIPPED"
"""Set beside OFFLINE here: what a user's own OFFLINE refuses is only a warning then."""
READ = ("config.json", "tokenizer_config.json")


def skip_hub_out_of_reach(config: Config, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set OFFLINE if a model of `config` has a hub's name and the hub cannot be connected to in REACH_S.

    For commands that only judge: processes that they start inherit it.
    """
    if OFFLINE in environment or all(Path(name).is_dir() for name in _models(config)):
        return
    if not reachable(environment.get("HF_ENDPOINT") or HUB):
        environment[OFFLINE] = environment[SKIPPED] = "1"


def is_skipped(name: str, environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether the model is on the hub alone, out of reach."""
    if SKIPPED not in environment or Path(name).is_dir():
        return False
    from huggingface_hub import try_to_load_from_cache  # takes a second

    return not all(isinstance(try_to_load_from_cache(name, file), str) for file in READ)


def _models(config: Config) -> Iterable[str]:
    teachers = [name for each in config.teacher.teachers.values() for name in (each.model, each.tokenizer)]
    return filter(None, (config.model.path, config.reward.model, *teachers))


def reachable(address: str, within_s: float = REACH_S) -> bool:
    """Whether `address`, or the proxy before it, accepts a connection."""
    found = threading.Event()

    def connect() -> None:
        with suppress(OSError, ValueError), socket.create_connection(_next_hop(address), within_s):
            found.set()
        ended.set()

    ended = threading.Event()
    threading.Thread(target=connect, daemon=True).start()  # no limit of time ends a look-up of names
    ended.wait(within_s)
    return found.is_set()


def _next_hop(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or PORTS.get(parts.scheme, 443)
