"""A run's processes, started by hand as an operator would, and what can be seen of them from outside.

`Processes` starts buffer, rollout server and learner (or `stand_in.py`) in sessions of their own, each on the GPUs it
is given, with logs in the run's folder; leaving it kills whatever still runs, and waits until its GPUs are free.
`Watch` samples in a thread what the server reports to the buffer, the CPU time of the server's front process, and
nvidia-smi's utilisation of each GPU.
Waits for nothing but what the caller names, and never longer than the caller allows.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml

from actors.watch.run_state import ask
from benchmarks.runs.photos import write_photos
from benchmarks.runs.ports import free_port
from benchmarks.weights.family_shapes import text_alone
from benchmarks.weights.seeing import SEEING
from benchmarks.weights.shapes import LETTERS, folder_of
from benchmarks.weights.sharing import as_host
from benchmarks.weights.table import progress
from buffer.data.images import ImageFormat
from buffer.wire.protocol import State
from configs.entrypoint import PARENT, die_with_parent
from configs.load import load
from configs.schema import Config, DataConfig, RolloutConfig

PROMPT_TOKENS = 128
PROBLEMS = 4096
PHOTOS, TEXT_ONLY = 512, 8
"""Rows for a model that sees; every so many of them have no image."""
FREED_S, FREED_MIB = 60.0, 512
"""How long a killed process may hold its GPU. vLLM does not start while another process frees memory there."""
FIRST_GPU = int(os.environ.get("FIRST_GPU", "0"))
"""Lets several benchmarks run at the same time, each on GPUs of its own."""


def sequences(number: int, samples: int) -> dict[str, Any]:
    """The keys that let a server run `number` sequences."""
    by_sequence = "sequences" in RolloutConfig.model_fields
    return {"sequences": number} if by_sequence else {"groups_in_flight": max(1, number // samples)}


def engine_keys(length: int, given: Mapping[str, Any], shared: bool = False, shape: str = "") -> dict[str, Any]:
    """`rollout.engine` for answers of at most `length`; room for a staging copy, and for a learner if it shares."""
    memory = {"gpu_memory_utilization": 0.4 if shared else 0.7} if torch.cuda.is_available() else {}
    return {"max_model_len": length + prompt_of(shape), **memory, **given}


def prompt_of(shape: str) -> int:
    """Tokens of the longest prompt: for a model that sees, those of an image and their two marks too."""
    return PROMPT_TOKENS + (SEEING[shape]["photos"][1] * 9 // 8 + 2 if shape in SEEING else 0)


def data_of(shape: str, work: Path, folder: Path) -> dict[str, Any]:
    """Write the problems for `shape`, whose model is in `folder`; returns the section `data`."""
    section: dict[str, Any] = {"chat_template": "none", "max_prompt_tokens": prompt_of(shape)}
    if shape in SEEING:
        tokens, (_, most) = SEEING[shape]["photos"], SEEING[shape]["pixels"]
        section |= {"max_pixels": min(most, DataConfig.model_fields["max_pixels"].default), "max_images": 1}
        form = ImageFormat.of(str(folder), DataConfig(train=work, **section))
        assert form is not None
        file = work / f"{shape}.parquet"
        write_photos(file, form, PHOTOS, tokens, LETTERS, PROMPT_TOKENS, TEXT_ONLY)
    else:
        file, draw = work / f"{shape}.jsonl", random.Random(0)
        rows = ("".join(draw.choices(LETTERS, k=PROMPT_TOKENS)) for _ in range(PROBLEMS))
        file.write_text("".join(json.dumps({"problem": row, "answer": ""}) + "\n" for row in rows))
    return section | {"train": str(file)}


def run_file(work: Path, name: str, shape: str, **sections: Mapping[str, Any]) -> Path:
    """Write problems and the run file of run `name` below `work`; returns the run file. `sections` override."""
    folder = folder_of(shape, work)
    config: dict[str, dict[str, Any]] = {
        "run": {"name": name, "folder": str(work), "versions": 1_000_000},
        "model": {"path": str(folder), "text_alone": text_alone(shape)},
        "data": data_of(shape, work, folder),
        "reward": {"function": f"{Path(__file__).with_name('reward.py')}:compute_score", "workers": 2},
        "learner": {"lr": 1e-12, "checkpoint_every": 1_000_000},
        "weights": {"probe_tolerance": 0.2},
        "buffer": {"address": f"tcp://127.0.0.1:{free_port()}"},
    }
    for section, keys in sections.items():
        config[section] = {**config.get(section, {}), **keys}
    Config.model_validate(config)
    (work / name).mkdir(parents=True, exist_ok=True)
    file = work / name / "given.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return file


class Died(RuntimeError):
    """A process of the run ended."""


class Processes:
    """A context manager around the processes of one run file. `gpus`: by name of a process, None for none; two may
    share one."""

    def __init__(self, file: Path, gpus: Mapping[str, int | None]) -> None:
        self.file, self.gpus, self.config = file, gpus, load([str(file)])
        self.folder = self.config.run.path
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, *words: str, **env: str) -> None:
        """Start `python -m MODULE FILE WORDS` under a name; MODULE may have a command, as `rollout teacher`."""
        gpu = self.gpus.get(name)
        seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(FIRST_GPU + gpu)}
        if gpu is not None and list(self.gpus.values()).count(gpu) > 1:
            seen |= as_host(name)
        log, tie = self.folder / f"{name}.log", {PARENT: str(os.getpid())}

        def tied() -> None:
            os.environ.update(tie)  # of the fork: whatever else this process starts may outlive it
            die_with_parent()

        with log.open("ab") as out:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", *module.split(), str(self.file), *words],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, preexec_fn=tied,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **tie, **seen, **env},

            )  # fmt: skip
        progress(f"{self.config.run.name}: {name} started, log in {log}")

    def stop(self, name: str, timeout_s: float = 20.0) -> None:
        """Stop one process as an operator would: SIGINT, and SIGKILL if it does not end."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        kill(process)

    def cpu_s(self, name: str) -> float | None:
        """CPU seconds of a process, its children left out; None if it does not run."""
        with suppress(KeyError, OSError):
            fields = Path(f"/proc/{self._running[name].pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return None

    def wait(self, what: str, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `done`. Raises TimeoutError, and Died as soon as a process has ended."""
        until, said = time.monotonic() + timeout_s, time.monotonic()
        while not done():
            for name, process in self._running.items():
                if process.poll() is not None:
                    raise Died(f"{name} ended with {process.returncode}: {last_line(self.folder / f'{name}.log')}")
            if time.monotonic() > until:
                raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
            if time.monotonic() > said + 20.0:
                said = time.monotonic()
                progress(f"{self.config.run.name}: waiting for {what}")
            time.sleep(0.1)
        progress(f"{self.config.run.name}: {what}")

    def state(self) -> State | None:
        """What the buffer says, if it answers."""
        return asyncio.run(ask(self.config))

    def records(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The records of versions and evaluations in a file of the run."""
        return records_in(self.folder / file)

    def __enter__(self) -> "Processes":
        self._used = self._memory_used()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running.values():
            kill(process)
        until = time.monotonic() + FREED_S
        while any(now > then + FREED_MIB for then, now in zip(self._used, self._memory_used(), strict=False)):
            if time.monotonic() > until:
                progress(f"{self.config.run.name}: its GPUs are not free after {FREED_S:.0f} s")
                break
            time.sleep(0.2)

    def _memory_used(self) -> list[int]:
        """MiB in use of each GPU of the run; none without nvidia-smi."""
        gpus = sorted({FIRST_GPU + gpu for gpu in self.gpus.values() if gpu is not None})
        return [used for gpu in gpus for used in ask_nvidia_smi("memory.used", gpu)]


def records_in(path: Path) -> list[dict[str, Any]]:
    """The records of versions and evaluations in a file of metrics, without a last line that is not complete."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if "version" in record]


def ask_nvidia_smi(what: str, gpu: int) -> list[int]:
    """One number about a GPU; none without nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", f"--id={gpu}"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        return [int(subprocess.run(query, capture_output=True, timeout=5.0, check=True).stdout)]
    return []


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process with its whole session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "its log is empty"


class Watch:
    """Samples of a run every `every_s` seconds until the end of the `with` block.

    `figures()` afterwards: the server's mean figures as it reported them (`running`, `tokens_per_s`, ...), `front`, its
    front process's share of a CPU, `stored`, the groups that waited in the buffer, and `gpu rollout`, `gpu learner`,
    the share of time in which nvidia-smi saw work.
    """

    def __init__(self, processes: Processes, every_s: float = 2.0) -> None:
        self._processes, self._every_s = processes, every_s
        self._ended = threading.Event()
        self._seen: list[dict[str, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._since, self._cpu_s = time.monotonic(), self._processes.cpu_s("rollout")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        cpu_s = self._processes.cpu_s("rollout")
        if cpu_s is not None and self._cpu_s is not None:
            self._seen.append({"front": (cpu_s - self._cpu_s) / (time.monotonic() - self._since)})

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            state = self._processes.state()
            found = {} if state is None else {"stored": float(state.counts.get("stored", 0))}
            for server in state.servers.values() if state else ():
                found |= {
                    key: value for key, value in server.get("stats", {}).items() if isinstance(value, int | float)
                }
            self._seen.append(found | self._utilisation())

    def _utilisation(self) -> dict[str, float]:
        gpus = {name: gpu for name, gpu in self._processes.gpus.items() if gpu is not None}
        seen = {name: ask_nvidia_smi("utilization.gpu", FIRST_GPU + gpu) for name, gpu in gpus.items()}
        return {f"gpu {name}": percent / 100.0 for name, found in seen.items() for percent in found}

    def figures(self) -> dict[str, float]:
        """The mean of each figure."""
        keys = {key for seen in self._seen for key in seen}
        return {key: mean(seen[key] for seen in self._seen if key in seen) for key in sorted(keys)}
