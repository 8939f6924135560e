"""How each process of a run treats variables that a pod, shell or scheduler has set, as a table.

The tests call each process's `main` in this process, up to its refusals. Two tests start real processes, with odd but
harmless variables.
"""

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import buffer.__main__
import learner.__main__
import rollout.__main__
from actors.doctor import findings, run_file
from actors.doctor.host import Gpu, Machine, Torch, judge_visible_gpus, visible_gpus
from actors.process import Process
from actors.supervise import keeper, launch
from configs import variables
from configs.entrypoint import ABOVE
from configs.load import load
from examples.countdown.make_model import make_tokenizer
from rollout.engine.arguments import environment
from rollout.engine.vllm_variables import unreadable_variables
from tests.harness.lanes import long_but
from tests.harness.ports import free_port
from tests.harness.weightless import add_weights

ROOT = Path(__file__).parents[1]
JOB = {
    **{"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "NODE_RANK": "1"},
    **{"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29500", "ROLE_RANK": "2", "TORCHELASTIC_RUN_ID": "other"},
    **{"TORCHELASTIC_USE_AGENT_STORE": "True", "VLLM_DP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
}
"""Variables of a shell inside another job."""
PROXIED = {"http_proxy": "http://proxy.test:3128", "NO_PROXY": "lan.test"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a model (only config and tokenizer) and a problem."""
    made = tmp_path_factory.mktemp("run")
    make_tokenizer().save_pretrained(made / "model")
    (add_weights(made / "model") / "config.json").write_text('{"model_type": "qwen2"}')
    (made / "p.jsonl").write_text(json.dumps({"problem": "1+1", "answer": "2"}) + "\n")
    return made


@pytest.fixture
def words(folder: Path, tmp_path: Path) -> list[str]:
    """Return a valid command line."""
    keys = {
        "run.folder": tmp_path / "runs",
        "model.path": folder / "model",
        "data.train": folder / "p.jsonl",
        "reward.function": "exact_match",
        "buffer.address": f"tcp://127.0.0.1:{free_port()}",
    }
    return [f"--{key}={value}" for key, value in keys.items()]


def judged(argv: Sequence[str]) -> int:
    """Run what `python -m configs` runs in a separate process."""
    refused = run_file.judge(load(argv)).refused
    print("\n".join(refused), file=sys.stderr)
    return 2 if refused else 0


def doctor(argv: Sequence[str]) -> int:
    """Run `python -m actors doctor` on a healthy machine."""
    facts = Machine((3, 12), {"torch": "2.13.0+cpu"}, Torch(), 10**12, 10**12, 10**12, 2**20)
    found = findings.doctor(load(argv), facts)
    print("\n".join(map(str, found)), file=sys.stderr)
    return 2 if any(one.state == "fail" and one.what == findings.RUN_FILE for one in found) else 0


SERVERS = {"rollout": rollout.__main__.main}
EVERY: dict[str, Callable[[Sequence[str]], int]] = {
    "configs": judged,
    "doctor": doctor,
    "launch": launch.main,
    "buffer": buffer.__main__.main,
    "learner": learner.__main__.main,
    **SERVERS,
}
JUDGES = {name: EVERY[name] for name in ("configs", "doctor", "launch")}
LEARNER = {"learner": EVERY["learner"]}
UNKNOWN = "not an interface of this machine"
CASES: list[tuple[dict[str, str], dict[str, Callable[[Sequence[str]], int]], str]] = [
    ({"OMP_NUM_THREADS": "0"}, EVERY, "OMP_NUM_THREADS: '0' is not a number of threads; unset it, or set 1 or more"),
    ({"OMP_NUM_THREADS": "abc"}, EVERY, "OMP_NUM_THREADS: 'abc' is not a number of threads"),
    ({"MKL_NUM_THREADS": "-2"}, EVERY, "MKL_NUM_THREADS: '-2' is not a number"),
    ({"GLOO_SOCKET_IFNAME": "eth77"}, EVERY, f"GLOO_SOCKET_IFNAME: eth77 is {UNKNOWN} (lo"),
    ({"NCCL_SOCKET_IFNAME": "=eth77"}, EVERY, f"NCCL_SOCKET_IFNAME: =eth77 is {UNKNOWN}"),
    ({"http_proxy": "http://proxy:abc"}, EVERY, "http_proxy: http://proxy:abc is not the address of a proxy; write"),
    ({"ALL_PROXY": "socks5://"}, EVERY, "ALL_PROXY: socks5:// is not the address of a proxy"),
    ({"VLLM_RPC_BASE_PATH": "/" + "x" * 112}, EVERY, "has 113 bytes, but vLLM's sockets allow 70; unset it"),
    ({"VLLM_RPC_BASE_PATH": "/no/such"}, EVERY, "VLLM_RPC_BASE_PATH: /no/such is not a writable folder"),
    ({"VLLM_PORT": "tcp://10.0.0.7:80"}, JUDGES | SERVERS, "VLLM_PORT: vLLM cannot read 'tcp://10.0.0.7:80'"),
    ({"VLLM_CPU_KVCACHE_SPACE": "much"}, JUDGES | SERVERS, "VLLM_CPU_KVCACHE_SPACE: vLLM cannot read 'much' (invalid"),
    (
        {"TORCH_LOGS": "nosuch"},
        {"configs": judged},
        "TORCH_LOGS: torch or transformers cannot be used (Value",
    ),
    ({"RANK": "0", "WORLD_SIZE": "4"}, LEARNER, "learner.ranks: 1, but WORLD_SIZE is 4; set learner.ranks to 4, or un"),
    ({"RANK": "0"}, LEARNER, "WORLD_SIZE: not set; set it to learner.ranks (1), or unset RANK and WORLD_SIZE if a pod"),
    ({"RANK": "x", "WORLD_SIZE": "1"}, LEARNER, "RANK: 'x' is not one of 0 to 0"),
    ({"RANK": "1", "WORLD_SIZE": "1"}, LEARNER, "RANK: '1' is not one of 0 to 0"),
    ({"NODE_RANK": "3"}, LEARNER, "NODE_RANK: 3 is not one of 0 to 0; correct it or learner.nodes (1)"),
    ({"SLURM_STEP_NUM_TASKS": "many"}, LEARNER, "SLURM_STEP_NUM_TASKS: 'many' is not one of 1 or more; unset"),
]


@pytest.mark.parametrize(
    ("process", "given", "line"),
    [
        pytest.param(process, given, line, id=f"{'-'.join(given)}={next(iter(given.values()))[:9]}-{name}")
        for given, processes, line in CASES
        for name, process in processes.items()
    ],
)
def test_a_wrong_variable_is_one_line_and_nothing_starts(
    process: Callable[[Sequence[str]], int],
    given: dict[str, str],
    line: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if process in JUDGES.values():  # these faults avoid the trials, which take seconds
        words += ["--reward.function=none", "--model.path=/no/such"]
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    try:
        code = process(words)
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    errors = capsys.readouterr().err
    assert code == 2 and line in errors, errors
    assert "Traceback" not in errors and not (tmp_path / "runs").exists()


FINE = [
    {"OMP_NUM_THREADS": "4,2"},
    {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "1"},
    {"GLOO_SOCKET_IFNAME": "lo"},
    {"NCCL_SOCKET_IFNAME": "^docker,veth"},
    {"NCCL_SOCKET_IFNAME": "l"},
    {"http_proxy": "proxy:3128", "ALL_PROXY": "socks5://127.0.0.1:1080", "no_proxy": "*"},
    {"http_proxy": "", "GLOO_SOCKET_IFNAME": ""},
    {"VLLM_RPC_BASE_PATH": "/tmp"},
    {"TZ": "Nowhere/Else", "COLUMNS": "0", "TERM": "dumb", "NO_COLOR": "1", "LANG": "C", "HF_HOME": "/no/such"},
    JOB,
]


@pytest.mark.parametrize("given", FINE, ids=lambda given: "-".join(given)[:40])
def test_valid_variables_are_not_refused(given: dict[str, str]) -> None:
    assert variables.problems(given) == []


def test_a_launch_gives_no_process_a_place_in_another_job(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they did, and the learner tried for 615 s to join the ranks at MASTER_ADDR."""
    for name, value in (JOB | PROXIED | {"PYTHONIOENCODING": "ascii", "PYTHONINSPECT": "1", "MINE": "1"}).items():
        monkeypatch.setenv(name, value)
    config = load([*words, "--weights.host=10.1.2.3"])
    made = launch.processes(config)
    assert {process.role for process in made} == {"buffer", "learner", "rollout"}
    for process in made:
        env = keeper.environment(process)
        assert not (JOB.keys() | {"PYTHONIOENCODING", "PYTHONINSPECT"}) & env.keys()
        assert env["MINE"] == env["PYTHONUTF8"] == "1" and env["http_proxy"] == PROXIED["http_proxy"]
        assert env["no_proxy"] == env["NO_PROXY"] == "lan.test,localhost,127.0.0.1,::1,10.1.2.3"
    given = Process("learner", "learner", (), Path(), env={"MASTER_ADDR": "10.1.2.3", "NODE_RANK": "1"})
    assert keeper.environment(given)["MASTER_ADDR"] == "10.1.2.3"  # the gang's own variables are kept
    assert ABOVE in keeper.environment(given)


def test_only_a_learner_started_by_hand_keeps_its_place() -> None:
    by_hand, rank = dict(JOB), dict(JOB)
    variables.prepare(environment=by_hand)
    variables.prepare(is_rank=True, environment=rank)
    assert not JOB.keys() & by_hand.keys() and rank == JOB


def test_no_process_takes_part_in_the_training_of_another_program() -> None:
    """With these two, transformers gave a learner of one rank a model whose weights were all zero."""
    others = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    by_hand, rank = dict(others), JOB | others
    variables.prepare(environment=by_hand)
    variables.prepare(is_rank=True, environment=rank)
    assert not others.keys() & (by_hand.keys() | rank.keys() | variables.for_children(others).keys())
    assert rank == JOB


@pytest.mark.parametrize(
    ("given", "value", "seen", "wrong"),
    [
        (2, None, [0, 1], ""),
        (2, "", [], ""),
        (2, "1", [1], ""),
        (2, "1,0", [1, 0], ""),
        (2, "GPU-b", [1], ""),
        (2, "0,7,1", [0], "7"),
        (2, "abc", [], "abc"),
        (2, "-1", [], "-1"),
        (2, "0,0", [], "0"),
        (2, "GPU-", [], "GPU-"),
    ],
)
def test_gpus_that_cuda_shows(given: int, value: str | None, seen: list[int], wrong: str) -> None:
    assert visible_gpus(value, ["GPU-aa", "GPU-bb"][:given]) == (seen, wrong)


def test_gpus_that_are_hidden_or_not_there() -> None:
    every = [Gpu("NVIDIA H100", 81559, 4, f"GPU-{number}") for number in range(2)]

    def judge(value: str | None, gpus: Sequence[Gpu] = every) -> tuple[list[str], list[str]]:
        return judge_visible_gpus({} if value is None else {"CUDA_VISIBLE_DEVICES": value}, gpus)

    assert judge(None) == judge("0,1") == judge("GPU-1") == judge("MIG-x") == judge("7", []) == ([], [])
    for hides in ("", "-1"):
        refused, (line,) = judge(hides)
        assert not refused and f"CUDA_VISIBLE_DEVICES: {hides!r} hides all 2 GPUs, so everything runs on the" in line
    for value, word in (("abc", "abc"), ("0,2", "2"), ("1,1", "1")):
        (line,), warned = judge(value)
        assert not warned and line.endswith(f"{word!r} names no GPU of this machine, or one twice; unset it, or name "
                                            "some of 0, 1")  # fmt: skip


@pytest.mark.parametrize(
    ("url", "given", "proxy"),
    [
        ("http://judge.test/v1", {}, None),
        ("http://judge.test/v1", PROXIED, "http://proxy.test:3128"),
        ("https://judge.test/v1", PROXIED, None),
        ("https://judge.test/v1", {"ALL_PROXY": "proxy.test:1"}, "http://proxy.test:1"),
        ("http://judge.test", PROXIED | {"no_proxy": "other.test, .judge.test"}, None),
        ("http://a.judge.test", PROXIED | {"no_proxy": "judge.test"}, None),
        ("http://notjudge.test", PROXIED | {"no_proxy": "judge.test"}, "http://proxy.test:3128"),
        ("http://judge.test:8000", PROXIED | {"no_proxy": "judge.test:9000"}, "http://proxy.test:3128"),
        ("http://10.1.2.3:8000", PROXIED | {"no_proxy": "10.0.0.0/8"}, None),
        ("http://11.1.2.3:8000", PROXIED | {"no_proxy": "10.0.0.0/8"}, "http://proxy.test:3128"),
        ("http://judge.test", PROXIED | {"no_proxy": "*"}, None),
        ("http://127.0.0.1:8000", PROXIED, None),
        ("http://127.3.2.1:8000", PROXIED, None),
        ("http://[::1]:8000", PROXIED, None),
        ("http://localhost:8000", PROXIED, None),
    ],
)
def test_the_proxy_of_an_address(url: str, given: dict[str, str], proxy: str | None) -> None:
    assert variables.proxy_of(url, given) == proxy


def test_sockets_lie_in_a_short_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a TMPDIR of 113 characters the sockets of vLLM and the weights wire failed, with 26 or more Ray's."""
    for length in (20, 25, 26, 70, 71, 81, 82, 113):
        folder = Path("/tmp") / f"{'t' * (length - 5 - 6)}{os.getpid():06}"[-(length - 5) :]
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        assert len(str(folder)) == length
        for limit in (variables.RAY_BYTES, variables.VLLM_BYTES, variables.WEIGHTS_BYTES):
            assert variables.socket_folder(limit, {}) == (str(folder) if length <= limit else "/tmp")
        assert environment(cpu=True)["VLLM_RPC_BASE_PATH"] == (str(folder) if length <= 70 else "/tmp")
        folder.rmdir()
    with socket.socket(socket.AF_UNIX) as one:  # checks the limits' assumption
        most = tmp_path / ("z" * (variables.SOCKET_BYTES - len(str(tmp_path)) - 1))
        one.bind(str(most))
    with socket.socket(socket.AF_UNIX) as one, pytest.raises(OSError, match="too long"):
        one.bind(f"{most}z")


def test_no_folder_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "SHORT", ())
    for folder, own_ray, says in (
        (tmp_path, True, f"Ray's sockets allow {variables.RAY_BYTES}"),
        (tmp_path / ("z" * 71), False, f"vLLM's sockets allow {variables.VLLM_BYTES}"),
        (tmp_path / ("z" * 71), True, f"Ray's sockets allow {variables.RAY_BYTES}"),
    ):
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        (line,) = variables.problems({"TMPDIR": str(folder)}, own_ray=own_ray)
        assert line.startswith(f"TMPDIR: {folder} has ") and line.endswith("set TMPDIR to a shorter folder")
        assert says in line
    with tempfile.TemporaryDirectory(prefix="z" * 30, dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert variables.problems({"TMPDIR": short}) == []


def test_a_variable_of_vllm_that_reads_its_own_module_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DP_RANK_LOCAL", "1")
    assert list(unreadable_variables()) == []


def test_caches_that_cannot_be_written_are_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    given = {"HOME": str(tmp_path), "VLLM_CACHE_ROOT": str(file), "HF_HOME": str(file / "hub")}
    assert variables.warnings({"HOME": str(tmp_path)}, "no/such") == []
    assert [line.partition(":")[0] for line in variables.warnings(given, "no/such")] == ["VLLM_CACHE_ROOT", "HF_HOME"]
    assert len(variables.warnings(given, str(tmp_path))) == 1  # a model in a folder needs no hub
    assert [line.split()[0] for line in variables.warnings({"HOME": str(file)}, "no/such")] == ["HOME:"] * 3
    (old,) = variables.warnings({"HOME": str(tmp_path), "TRANSFORMERS_CACHE": "/c"}, str(tmp_path))
    assert old.startswith("TRANSFORMERS_CACHE: /c: transformers 5 does not read it; set HF_HOME")


def test_a_user_id_that_the_machine_does_not_know_gets_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers: torch and vLLM need a user name when they are imported, and raise KeyError without one."""
    assert variables.user({}) == {}

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert variables.user({}) == {"USER": f"uid{os.getuid()}", "HOME": tempfile.gettempdir()}
    assert variables.user({"LOGNAME": "ann", "HOME": "/home/ann"}) == {}


def test_exit_codes_are_known_though_a_shell_ignores_the_end_of_children() -> None:
    """After `trap '' CHLD` the kernel forgets them: a keeper would see 255 of every process, be it done or refused."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        variables.prepare(environment={})
        child = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {})
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_output_to_a_full_disk_is_a_failure() -> None:
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "actors", "--help"]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        done = subprocess.run(line, cwd=ROOT, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "the output is incomplete: No space left on device\n")


def test_too_few_open_files_are_refused(words: list[str]) -> None:
    """In a separate process, because a limit cannot be raised again. Before, the buffer accepted no client."""
    code = "import sys; from actors.doctor.run_file import judge; from configs.load import load; "
    code += "print(*judge(load(sys.argv[1:])).refused, sep='\\n')"
    line = [sys.executable, "-c", code, *words, "--reward.function=none", "--model.path=/no/such"]
    command = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *line]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "ulimit -n: 64 files may be open, but the buffer of this run needs 106; start the buffer" in done.stdout


ODD = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "0", "TZ": "Nowhere/Else", "PYTHONIOENCODING": "ascii", "LANG": "C"}
ODD |= {"PYTHONSTARTUP": "/no/such", "PYTHONPATH": f"{ROOT}:/no/such::", "XDG_CACHE_HOME": "/no/such", "RANK": "x"}
ODD |= {"PYTHONINSPECT": "1"}


@pytest.mark.parametrize(("shut", "said"), long_but([("<&-", True), ("<&- >&- 2>&-", False)], 1))
def test_processes_work_with_odd_terminals_and_closed_streams(shut: str, said: bool, words: list[str]) -> None:
    """A real process. Its first line has a letter that is not ASCII, which once caused a traceback."""
    words[0] = f"{words[0]}-läufe"
    line = ["bash", "-c", f'umask 077; exec "$@" {shut}', "bash", sys.executable, "-m", "configs", *words]
    env = {key: value for key, value in os.environ.items() if key != "HOME"} | ODD
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert ("valid, fingerprint" in done.stdout) is said and (r"runs-l\xe4ufe" in done.stdout) is said
