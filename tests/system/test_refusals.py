"""Bad input to the real processes: one line with key, value and remedy, exit code 2, and nothing is started."""

import json
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.toy import free_port, python

YAML = "examples/countdown/quickstart.yaml"
SHAPE = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
LAUNCH = ("actors", "launch", YAML)


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Overrides that make the quickstart's file acceptable."""
    row = {"prompt": [{"role": "user", "content": "8 6 4=2"}], "reward_model": {"ground_truth": {"target": 2}}}
    pq.write_table(pa.Table.from_pylist([row] * 4), tmp_path / "train.parquet")
    pq.write_table(pa.table({"text": ["8 6 4=2"]}), tmp_path / "columns.parquet")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    places = [f"--run.folder={tmp_path}/runs", f"--model.path={tmp_path}/model", "--data.eval=null"]
    return [*places, f"--data.train={tmp_path}/train.parquet", f"--buffer.address=tcp://127.0.0.1:{free_port()}"]


@pytest.mark.parametrize(
    ("command", "wrong", "words"),
    [
        (LAUNCH, "--learner.lrr=1e-6", "learner.lrr: no such key"),
        (("learner", YAML), "--optim.lr=1e-6", "did you mean learner.lr?"),
        (("rollout", YAML), "--reward.function=nowhere.py:score", "nowhere.py"),
        (("buffer", YAML), "--data.train={folder}/nowhere.parquet", "nowhere.parquet: no such file"),
        (LAUNCH, "--data.train={folder}/columns.parquet", "needs the columns prompt, reward_model"),
        (LAUNCH, "--buffer.address=tcp://127.0.0.1:{busy}", "Address already in use"),
        (("buffer", YAML), "--buffer.address=tcp://127.0.0.1:{busy}", "another process listens there"),
        (LAUNCH, "--learner.ranks=1000", "1000 is more than batch.groups 32 x batch.samples 16"),
    ],
)
def test_refused_in_one_line_before_anything_starts(
    command: tuple[str, ...], wrong: str, words: str, given: list[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        wrong = wrong.format(folder=tmp_path, busy=busy.getsockname()[1])
        ended = python(*command, *given, wrong, timeout_s=120.0)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert words in line
    assert not list(tmp_path.glob("runs/*/logs/*"))
