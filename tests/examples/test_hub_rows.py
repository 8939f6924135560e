"""Rows of the hub for the run files in configs/: each file that these name is made by a command that they name."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.load import load
from configs.writing import draft_of
from examples import hub_rows
from tests.harness.toy import ROOT

SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


def test_the_number_of_an_answer_is_its_truth(tmp_path: Path) -> None:
    asked = []

    def get(name: str, file: str) -> str:
        asked.append((name, file))
        rows = {"question": ["How many?", "And now?"], "answer": ["48 + 24 = 72\n#### 1,072", "It is -3\n#### -3"]}
        pq.write_table(pa.table(rows), tmp_path / "copy.parquet")
        return str(tmp_path / "copy.parquet")

    said = hub_rows.write("gsm8k_numbers", tmp_path / "out", get)
    assert said == f"{tmp_path}/out: 2 rows to train on, 2 held out, from openai/gsm8k"
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert rows == [{"problem": "How many?", "answer": "1072"}, {"problem": "And now?", "answer": "-3"}]
    assert asked == [("openai/gsm8k", f"main/{split}-00000-of-00001.parquet") for split in ("train", "test")]
    assert "rows kept" in hub_rows.write("gsm8k_numbers", tmp_path / "out", get) and len(asked) == 2


def test_without_a_network_the_command_says_so_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(name: str, file: str, **options: str) -> str:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(hub_rows, "hf_hub_download", unreachable)
    assert hub_rows.main(["geometry3k", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said == "hub_rows: hiyouga/geometry3k cannot be had from the hub of data sets: no route\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_run_file_names_the_command_that_makes_its_rows(name: str) -> None:
    file = ROOT / "configs" / f"{name}.yaml"
    head = file.read_text().partition("\nrun:")[0].replace("\\\n#", "")
    (made,) = re.findall(r"^# +python -m (examples\.[\w.]+)(.*?)(?:   |$)", head, re.MULTILINE)
    module, words = made
    config = load([str(file)])
    sources = [*config.data.sources().values()]
    folders = {str(Path(source.path if hasattr(source, "path") else str(source)).parent) for source in sources}
    out = re.search(r"--out (\S+)", words)
    assert folders == {out[1] if out else f"data/{words.split()[0]}"}
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_a_full_disk_is_no_fault_of_the_hub_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, out = tmp_path / "copy.parquet", tmp_path / "out"
    copy.write_bytes(b"rows")
    out.mkdir()
    draft_of(out / "train.parquet").symlink_to("/dev/full")
    monkeypatch.setattr(hub_rows, "hf_hub_download", lambda *given, **options: str(copy))
    assert hub_rows.main(["geometry3k", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("hub_rows: ") and said.endswith(": No space left on device; make room on its disk\n")
    assert not [*out.iterdir()]
