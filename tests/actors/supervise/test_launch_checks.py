"""What the launcher refuses before anything starts, and the commands it would start."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from actors.doctor.run_file import gpus_missing, misfits, without_place
from actors.supervise import launch
from actors.supervise.ray_cluster import connect
from buffer.keys import KeysError
from configs.checks import cluster_of, starts_ray
from configs.load import ConfigError, load
from examples.countdown.make_model import make_tokenizer
from tests.harness.lanes import long_but
from tests.harness.ports import free_port
from tests.harness.weightless import add_weights


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command line that is in order, but for the model, of which there are only config and tokenizer."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    (add_weights(tmp_path / "model") / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "p.jsonl").write_text(json.dumps({"problem": "1+1", "answer": "2"}) + "\n")
    keys = {
        "run.folder": tmp_path / "runs",
        "model.path": tmp_path / "model",
        "data.train": tmp_path / "p.jsonl",
        "reward.function": "exact_match",
        "buffer.address": f"tcp://127.0.0.1:{free_port()}",
    }
    return [f"--{key}={value}" for key, value in keys.items()]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr of a launch that is refused."""
    try:
        code = launch.main(argv)
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    assert code == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.long
def test_a_busy_port_is_refused(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        (line,) = refused([*words, f"--buffer.address={address}"], capsys)
    assert "buffer.address" in line and address in line and "another port" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_an_open_port_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refused([*words, "--buffer.address=tcp://127.0.0.1:*"], capsys)
    assert "buffer.address" in line and "name one" in line


@pytest.mark.long
def test_data_without_the_columns_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"question": "1+1"}\n')
    (line,) = refused(words, capsys)
    assert "data.train" in line and "question" in line


def test_a_missing_file_and_a_wrong_key_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert any("nope.parquet" in line for line in refused([*words, "--data.train=nope.parquet"], capsys))
    (line,) = refused([*words, "--learner.lrr=1"], capsys)
    assert "learner.lr" in line


@pytest.mark.long
def test_a_key_that_vllm_does_not_know_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    (line,) = refused([*words, "--rollout.engine.max_num_seq=4"], capsys)
    assert "rollout.engine.max_num_seq" in line and "max_num_seqs" in line


def test_who_names_a_cluster_is_named_where_it_does_not_answer(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    for more, name in (([], "RAY_ADDRESS"), ([f"--cluster.address={nobody}"], "cluster.address")):
        config = load([*words, *more])
        with pytest.raises(ConfigError, match=rf"^{name}: {nobody}: cannot connect: .*refused"):
            connect(config, cluster_of(config))


def test_the_commands_are_the_plain_ones(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = load([*words, "--rollout.servers=2", "--rollout.tensor_parallel=4", "--learner.ranks=8"])
    found = launch.processes(config)
    file = str(tmp_path / "runs" / "run" / "config.yaml")
    assert [process.argv[1:] for process in found] == [
        ("-m", "buffer", file),
        ("-m", "learner", file),
        ("-m", "rollout", file, "--name", "rollout-0"),
        ("-m", "rollout", file, "--name", "rollout-1"),
    ]
    assert [process.gpus for process in found] == [0, 8, 4, 4]
    assert found[3].log == tmp_path / "runs" / "run" / "logs" / "rollout-1.log"
    env = found[0].env
    assert env["HF_HUB_OFFLINE"] == "1" and "RAY_ADDRESS" not in env and "CUDA_VISIBLE_DEVICES" not in env


def test_gpus_are_counted_only_where_there_are_any(words: list[str]) -> None:
    config = load([*words, "--learner.ranks=2"])
    assert gpus_missing(config, 0, "Ray sees") is None and gpus_missing(config, 3, "Ray sees") is None
    assert gpus_missing(config, 2, "Ray sees") == "the run needs 3 GPUs (learner 2, servers 1), Ray sees 2"


def test_cuda_without_gpus_is_refused(words: list[str]) -> None:
    config = load([*words, "--learner.device=cuda"])
    assert gpus_missing(config, 0, "Ray sees") == "the run needs 1 GPUs (learner 1), Ray sees 0"


@pytest.mark.parametrize(
    ("more", "said"),
    long_but(
        [
            (["--learner.device=cuda"], "the run needs 1 GPUs (learner 1), here are 0: lower learner.ranks, "),
            (
                ["--learner.nodes=2", "--learner.ranks=2"],
                "learner.nodes: 2 take a machine each; name a Ray cluster in ",
            ),
        ],
        1,
    ),
)
def test_what_one_machine_has_no_room_for_is_refused(
    more: list[str], said: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("ray.init", None)
    (line,) = refused([*words, "--rollout.device=cpu", *more], capsys)
    assert line.startswith(said) and "RAY_ADDRESS" in line


def test_a_machine_with_the_gpus_has_room(words: list[str]) -> None:
    config = load([*words, "--learner.ranks=2", "--rollout.servers=2"])
    assert list(misfits(config, 0)) == list(misfits(config, 4)) == []
    assert len(list(misfits(config, 3))) == 1


@pytest.mark.parametrize(
    ("mode", "said"), [(0o644, "mode 0644 lets others read the key"), (None, "no such file beside")]
)
def test_a_key_of_no_use_is_refused_before_anything_starts(mode: int | None, said: str, words: list[str]) -> None:
    config = load(words)
    made = launch.prepare(config)
    made.unlink()
    key = config.run.path / "keys" / "learner.public"
    key.chmod(mode) if mode else key.unlink()
    with pytest.raises(KeysError, match=said):
        launch.prepare(config)
    assert not made.exists()


@pytest.mark.parametrize(
    ("address", "variable", "cluster", "starts"),
    [
        (None, "", "", False),
        (None, "10.0.0.1:6379", "10.0.0.1:6379", False),
        ("auto", "10.0.0.1:6379", "auto", False),
        ("local", "10.0.0.1:6379", "", True),
        (None, "local", "", True),
        ("auto", "local", "auto", False),
    ],
)
def test_ray_is_used_only_where_it_is_named(
    address: str | None,
    variable: str,
    cluster: str,
    starts: bool,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    config = load([*words, *([f"--cluster.address={address}"] if address else [])])
    assert (cluster_of(config), starts_ray(config)) == (cluster, starts)


def test_the_config_file_is_the_one_every_process_reads(words: list[str]) -> None:
    config = load(words)
    assert load([str(launch.prepare(config))]) == config


def test_help_and_unknown_commands() -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "actors", *argv], capture_output=True, text=True, check=False)

    helped, unknown = run("--help"), run("lunch")
    assert helped.returncode == 0 and all(word in helped.stdout for word in ("launch", "status", "report", "doctor"))
    assert unknown.returncode == 2 and "launch" in unknown.stderr


SERVED = ["--reward.function=reward_model", "--reward.servers=2", "--reward.engine.tensor_parallel_size=2"]


def test_reward_servers_are_started_each_with_its_gpus(words: list[str], tmp_path: Path) -> None:
    config = load([*words, *SERVED, "--reward.model=m"])
    file = str(tmp_path / "runs" / "run" / "config.yaml")
    found = launch.processes(config)[3:]
    assert [process.argv[1:] for process in found] == [
        ("-m", "rollout", "reward", file, "--name", "reward-0"),
        ("-m", "rollout", "reward", file, "--name", "reward-1"),
    ]
    assert [(process.role, process.gpus, process.log.name) for process in found] == [
        ("reward", 2, "reward-0.log"),
        ("reward", 2, "reward-1.log"),
    ]
    needed = "the run needs 6 GPUs (learner 1, servers 1, reward servers 4), Ray sees 4"
    assert gpus_missing(config, 4, "Ray sees") == needed
    assert [process.gpus for process in launch.processes(load([*words, *SERVED, "--rollout.device=cpu"]))[2:]] == [
        0
    ] * 3


def test_teacher_servers_are_started_each_with_its_gpus(words: list[str], tmp_path: Path) -> None:
    sources = "[{data_source: math, model: b, servers: 2, engine: {tensor_parallel_size: 4}}]"
    config = load([*words, "--teacher.model=m", "--teacher.servers=1", f"--teacher.by_source={sources}"])
    file = str(tmp_path / "runs" / "run" / "config.yaml")
    found = launch.processes(config)[3:]
    assert [process.argv[1:] for process in found] == [
        ("-m", "rollout", "teacher", file, "--name", f"teacher-{number}") for number in range(3)
    ]
    assert [process.drain_s for process in launch.processes(config)[1:3]] == [600.0, 40.0]
    assert [(process.role, process.gpus, process.pool) for process in found] == [
        ("teacher", 1, ""),
        ("teacher", 4, "math"),
        ("teacher", 4, "math"),
    ]
    needed = "the run needs 11 GPUs (learner 1, servers 1, teacher servers 9), here are 4"
    assert gpus_missing(config, 4, "here are") == needed
    assert without_place(config, [8, 8]) == "teacher.servers: 9 GPUs of this machine, which has 8"
    on_cpu = load([*words, "--teacher.model=m", "--teacher.servers=2", "--rollout.device=cpu"])
    assert [process.gpus for process in launch.processes(on_cpu)[2:]] == [0] * 3


def test_teacher_servers_that_cannot_start_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = [f"--teacher.port={port}", "--teacher.servers=1", "--teacher.model=./none"]
        lines = refused([*words, *given, "--teacher.engine.max_model_length=9"], capsys)
    assert any(f"teacher.port: cannot listen on 127.0.0.1:{port}" in line for line in lines)
    assert any("teacher.model: ./none: no such folder" in line for line in lines)
    assert any("teacher.engine.max_model_length" in line and "did you mean" in line for line in lines)


@pytest.mark.long
def test_reward_servers_that_cannot_start_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    add_weights(tmp_path / "rm")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = [f"--reward.model={tmp_path / 'rm'}", f"--reward.port={port}", "--reward.engine.max_model_length=9"]
        lines = refused([*words, *SERVED, "--reward.servers=1", *given], capsys)
    assert any(f"reward.port: cannot listen on 127.0.0.1:{port}" in line for line in lines)
    assert any("is no reward model, its architecture is Qwen2ForCausalLM; name a sequence" in line for line in lines)
    assert any("reward.engine.max_model_length" in line and "did you mean" in line for line in lines)


def test_a_ray_that_does_not_start_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a bare Exception after 30 s in which its processes got too little of the machine."""

    def late(**options: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", late)
    (line,) = refused([*words, "--cluster.address=local", "--rollout.device=cpu", "--learner.device=cpu"], capsys)
    assert line.startswith("Ray: cannot start on this machine: Exception: The current node timed") and "again" in line
