"""Bad input: one line with key, value and remedy, exit code 2, and nothing is started.

Most rows call a command's `main` in this process; a few start the real process, for its exit code and its stderr.
`configs`, `doctor` and `launch` share one list of checks: in the fast lane rows of TOGETHER go through `launch`, and in
the long lane all rows go through all three. Each command prints the seconds it took.
"""

import importlib
import importlib.util
import json
import os
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.lanes import long_but
from tests.harness.ports import free_port
from tests.harness.toy import python
from tests.harness.weightless import add_weights

YAML = "examples/countdown/quickstart.yaml"
SHAPE = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
LAUNCH = ("actors", "launch", YAML)
COMMANDS = (("configs", YAML), ("actors", "doctor", YAML), LAUNCH)
REWARDS = """
import os, sys, time
if {at_import!r}:
    exec({at_import!r})
def plain(text): return 0.0
def score(solution_str, ground_truth): return 1 / len(solution_str)
def quiet(solution_str): sys.exit(3)
async def play(problem): ...
"""


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Overrides that make the quickstart's file acceptable, and the broken files that tests name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from examples.countdown.make_model import make_tokenizer

    truth = {"ground_truth": {"target": 2, "numbers": [8, 6, 4]}}
    row = {"prompt": [{"role": "user", "content": "8 6 4=2"}], "reward_model": truth}
    pq.write_table(pa.Table.from_pylist([row] * 4), tmp_path / "train.parquet")
    pq.write_table(pa.table({"text": ["8 6 4=2"]}), tmp_path / "columns.parquet")
    good = json.dumps({"problem": "8 6 4=2", "answer": "2"})
    (tmp_path / "broken.jsonl").write_text(f'{good}\n{good}\n{{"problem": \n')
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": ["8 6 4=2"], "reward_model": truth}) + "\n")
    for name, code in {
        "fine": "",
        "raises": "1 / 0",
        "exits": "sys.exit(3)",
        "dies": "os._exit(3)",
    }.items():
        (tmp_path / f"{name}.py").write_text(REWARDS.format(at_import=code))
    for name in ("model", "base", "large"):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = None if name == "base" else tokenizer.chat_template
        tokenizer.save_pretrained(tmp_path / name)
        (add_weights(tmp_path / name) / "config.json").write_text(json.dumps(SHAPE))
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**7, 10**7], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "large" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    places = [f"--run.folder={tmp_path}/runs", f"--model.path={tmp_path}/model", "--data.eval=null"]
    return [*places, f"--data.train={tmp_path}/train.parquet", f"--buffer.address=tcp://127.0.0.1:{free_port()}"]


def refused(capsys: pytest.CaptureFixture[str], module: str, *words: str) -> list[str]:
    """Call `module`'s `main`, which refuses these words; returns its lines on stderr."""
    code: int | str | None
    try:
        code = importlib.import_module(module).main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("module", "wrong", "words"),
    long_but(
        [
            ("learner.__main__", "--optim.lr=1e-6", "did you mean learner.lr?"),
            ("rollout.__main__", "--reward.function=nowhere.py:score", "nowhere.py"),
            ("rollout.__main__", "--model.path={folder}/base", "set data.chat_template: none"),
            ("buffer.__main__", "--data.train={folder}/nowhere.parquet", "nowhere.parquet: no such file"),
            ("actors.supervise.launch", "--learner.ranks=1000", "1000 is more than batch.groups 32 x batch.samples 16"),
        ],
        0,
        1,
        3,
    ),
)
def test_refused_in_one_line_before_anything_starts(
    module: str, wrong: str, words: str, given: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (line,) = refused(capsys, module, YAML, *given, wrong.format(folder=tmp_path))
    assert words in line
    assert not list(tmp_path.glob("runs/*/logs/*"))


@pytest.mark.parametrize(
    ("command", "wrong", "words"),
    [
        (LAUNCH, "--learner.lrr=1e-6", "learner.lrr: no such key"),
        (("buffer", YAML), "--data.train={folder}/broken.jsonl", "broken.jsonl: line 3: not JSON"),
        (("buffer", YAML), "--buffer.address=tcp://127.0.0.1:{busy}", "another process listens there"),
    ],
)
def test_a_process_refuses_in_one_line_and_exits_with_2(
    command: tuple[str, ...], wrong: str, words: str, given: list[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        wrong = wrong.format(folder=tmp_path, busy=busy.getsockname()[1])
        ended = python(*command, *given, wrong, timeout_s=120.0)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert words in line
    assert not list(tmp_path.glob("runs/*/logs/*"))


TOGETHER = [
    [
        ("--data.train={folder}/columns.parquet", "columns.parquet: needs the columns prompt, reward_model"),
        ("--sampling.stop=[the end]", "sampling.stop: 'the end' is 7 tokens of this tokenizer"),
        ("--rollout.engine.max_num_seq=4", "rollout.engine.max_num_seq: vLLM's AsyncEngineArgs has no such field"),
        ("--reward.function={folder}/raises.py:score", "raises.py cannot be imported: ZeroDivisionError"),
        ("--rollout.task={folder}/fine.py:play", "fine.py:play cannot be called with (problem, generate)"),
        ("--log.trackers=[wandb]", 'log.trackers: wandb is not installed here; pip install "headrace[tracking]"'),
    ],
    [
        ("--data.train={folder}/broken.jsonl", "broken.jsonl: line 3: not JSON"),
        ("--model.path={folder}/base", "base has no chat template; set data.chat_template: none"),
        ("--reward.function={folder}/fine.py:plain", "fine.py:plain: takes none of solution_str"),
        ("--buffer.address=tcp://127.0.0.1:{busy}", "Address already in use"),
    ],
    [
        (
            "--data.train={folder}/chats.jsonl",
            "chats.jsonl: no row can be made into a prompt, row 0: message 0 is '8 6 4=2'",
        ),
        ("--model.path={folder}/large", "run.folder: {folder}/runs: its checkpoints take"),
        ("--reward.function={folder}/exits.py:score", "exits.py cannot be imported: SystemExit: 3"),
    ],
    [
        ("--data.max_prompt_tokens=5", "data.max_prompt_tokens: 5: the prompts of all 4 rows looked at are longer"),
        (
            "--reward.function={folder}/dies.py:score",
            "reward.function: the process that tried it ended with exit code 3",
        ),
        ("--rollout.device=cuda", "buffer.address: {address} is reached from this machine only, but the run needs"),
    ],
]
"""What is wrong at once, and what is said of each."""


def prepared(
    rows: list[tuple[str, str]], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """Prepare a run file with many faults; returns the faults and the expected messages."""
    if importlib.util.find_spec("wandb"):  # nothing to refuse
        rows = [row for row in rows if "wandb" not in row[0]]
    wrong, words = map(list, zip(*rows, strict=True))
    if "--rollout.device=cuda" in wrong:  # only a cluster has the GPUs then
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        given.append("--weights.host=10.0.0.2")
    return wrong, words


def all_are_named(lines: list[str], words: list[str], folder: Path, address: str) -> None:
    """Each of `words` is in one line, there are no other lines, and nothing was started."""
    for named in (word.format(folder=folder, address=address) for word in words):
        assert sum(named in line for line in lines) == 1, (named, lines)
    assert len(lines) == len(words), lines
    assert not (folder / "runs").exists()
    assert not [process for process in os.listdir("/proc") if str(folder) in command_of(process)]


@pytest.mark.parametrize("rows", long_but(TOGETHER, 0, 1), ids=range(len(TOGETHER)))
def test_launch_names_all_that_is_wrong_at_once(
    rows: list[tuple[str, str]],
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong, words = prepared(rows, given, monkeypatch)
    address = f"tcp://127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as busy:
        wrong = [word.format(folder=tmp_path, busy=busy.getsockname()[1]) for word in wrong]
        lines = refused(capsys, "actors.supervise.launch", YAML, *given, f"--buffer.address={address}", *wrong)
    all_are_named(lines, words, tmp_path, address)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "commands"),
    [
        pytest.param(TOGETHER[2], COMMANDS[:1], id="one by configs"),
        *(pytest.param(rows, COMMANDS, id=str(n)) for n, rows in enumerate(TOGETHER)),
    ],
)
def test_every_command_names_all_that_is_wrong_at_once(
    rows: list[tuple[str, str]],
    commands: tuple[tuple[str, ...], ...],
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong, words = prepared(rows, given, monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as busy:

        def run(command: tuple[str, ...]) -> "tuple[subprocess.CompletedProcess[str], str]":
            begin, address = time.monotonic(), f"tcp://127.0.0.1:{free_port()}"  # each tries its own
            given_wrong = [word.format(folder=tmp_path, busy=busy.getsockname()[1]) for word in wrong]
            ended = python(*command, *given, f"--buffer.address={address}", *given_wrong, timeout_s=240.0)
            print(f"{command[-2]:<8} {time.monotonic() - begin:5.1f} s")
            return ended, address

        with ThreadPoolExecutor(len(commands)) as pool:
            done = pool.map(run, commands)
    for command, (ended, address) in zip(commands, done, strict=True):
        assert ended.returncode == 2, ended.stdout + ended.stderr
        lines = ended.stderr.splitlines()
        if "doctor" in command:
            lines = [line for line in ended.stdout.splitlines() if line.startswith("FAIL  run file")]
        all_are_named(lines, words, tmp_path, address)


def command_of(process: str) -> str:
    """The command line of a process by its number; empty if there is none."""
    try:
        return Path("/proc", process, "cmdline").read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.long
def test_what_a_made_up_answer_does_is_only_a_warning(given: list[str], tmp_path: Path) -> None:
    parts = ", ".join(f"{{function: '{tmp_path}/fine.py:{name}', name: {name}}}" for name in ("score", "quiet"))
    ended = python("configs", YAML, *given, f"--reward.function=[{parts}]")
    assert ended.returncode == 0, ended.stderr
    assert "\nvalid, fingerprint " in ended.stdout
    assert "prompts: the prompt of row 0 has 7 tokens: '8 6 4=2'" in ended.stdout
    first, second = [line for line in ended.stdout.splitlines() if line.startswith("warning: ")]
    assert "fails on 3 of 3 rows, row 0: ZeroDivisionError" in first and "SystemExit: 3" in second


def test_contradictions_are_named_beside_what_was_tried(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [
        f"--model.path={tmp_path}/base",
        "--sampling.stop=[ab, cd]",
        f"--reward.function={tmp_path}/raises.py:score",
    ]
    wrong += [f"--rollout.task={tmp_path}/fine.py:play", "--batch.target_staleness=9", "--rollout.engine.seqs=1"]
    lines = refused(capsys, "actors.supervise.launch", YAML, *given, *wrong)
    keys = [line.partition(":")[0] for line in lines]
    contradictions, tried = {"batch.target_staleness", "rollout.engine.seqs"}, {"reward.function", "rollout.task"}
    assert sorted(keys) == sorted([*contradictions, *tried, "model.path", "sampling.stop", "sampling.stop"])
