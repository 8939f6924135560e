"""The report of a finished run: what it reads, what it writes, what it says."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from actors.report import summary
from actors.watch.metrics_log import Records, moving_mean
from buffer.store.sql import EVALUATIONS
from configs.load import load, write
from configs.writing import WriteError
from tests.harness.chatml import ANSWER, CALLS, CHATML, HEAD, TOOL, episode
from tests.harness.watched import store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 40 versions whose learner restored version 20 once."""
    (tmp_path / "model").mkdir()
    words = [f"run.folder: {tmp_path}", "run.name: toy", "run.versions: 40", f"model.path: {tmp_path}/model"]
    words += [f"data.train: {tmp_path}/p.jsonl", "reward.function: countdown", "batch.max_staleness: 3"]
    overrides = [f"--{word.replace(': ', '=')}" for word in words]
    folder = tmp_path / "toy"
    write(load(overrides), folder / "config.yaml")
    rows = [
        {"version": v, "reward/mean": v / 40, "length/mean": 9.0, "age/mean": 1.0, "age/max": v % 3}
        for v in range(1, 30)
    ]
    rows += [
        {"version": v, "reward/mean": 0.5 + v / 80, "age/max": 2, "servers/running": 60 + v, "servers/places": 120.0}
        for v in range(21, 41)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"version": 41, "rew')
    (folder / "checkpoints" / "v000020" / "state").mkdir(parents=True)
    exported = folder / "checkpoints" / "v000040" / "huggingface"
    exported.mkdir(parents=True)
    (exported / "config.json").write_text("{}")
    return folder


def shown(run: Path) -> dict[str, Any]:
    """What the page of the run shows."""
    html = (run / "report.html").read_text()
    data = html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(data)
    return found


def test_an_adapter_is_named_with_the_way_to_whole_weights(run: Path) -> None:
    checkpoint = run / "checkpoints" / "v000040"
    (checkpoint / "huggingface").rename(checkpoint / "adapter")
    (checkpoint / "adapter" / "config.json").rename(checkpoint / "adapter" / "adapter_config.json")
    said = list(summary.outputs(run))
    line = f"adapter:    {checkpoint / 'adapter'}; whole weights: python -m learner merge {checkpoint} OUT"
    assert line in said and not any("vllm serve" in each for each in said)


def test_report_writes_a_page_and_says_where_things_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(run)
    assert summary.main([str(run)]) == 0
    said = capsys.readouterr().out
    html, page = (run / "report.html").read_text(), shown(run)
    assert 'src="' not in html and 'href="http' not in html and "<i>" not in html.partition('id="data"')[2]
    assert ["batch.max_staleness", "3"] in page["settings"] and page["overview"]["status"] == "ended"
    assert page["version"] == list(range(1, 41)) and page["columns"]["age/max"][24] == 2
    assert page["batches"] == [0, 39] and [e["answer"] for e in page["samples"]["39"]] == [
        "answer 2 <i>",
        "answer 3 <i>",
    ]
    assert [e["answer"] for e in page["examples"]["before"]] == ["answer 0 <i>", "answer 1 <i>"]
    assert f"vllm serve {run / 'checkpoints' / 'v000040' / 'huggingface'}" in said
    assert (
        "before (batch 0, reward 0.00): 8 6 4=2" in said and "after (batch 39, reward 1.00): What <b> is 1+1?" in said
    )
    assert "first 5 versions 0.075" in said and "last 20 versions 0.881" in said
    assert "the servers ran 90 sequences at a time in the mean, 75% of their places" in said
    assert "largest age 2 (batch.max_staleness 3)" in said
    failures = "reward failed 100 % of 7 attempts, most often KeyError (7); 2 items dropped, most often x (2)"
    assert failures in said and page["overview"]["failures"] == [["reward: KeyError", 7], ["dropped: x", 2]]


def test_an_episode_of_several_turns_is_read_turn_by_turn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CHATML.save(str(run.parent / "model" / "tokenizer.json"))
    stretches = [(HEAD, 0), (CALLS, 6), (TOOL.replace("391", "<i>391</i>"), 0), (ANSWER, 7)]
    store(run, episode(stretches, [(HEAD, 0), ("x" * 9000, 7)], rewards=[0.5, 1.0, 0.0]).pack())
    assert summary.main([str(run)]) == 0
    said, (first, *_) = capsys.readouterr().out, shown(run)["examples"]["before"]
    titles = [passage["title"] for chapter in first["episode"] for passage in chapter["passages"]]
    heads = [text for chapter in first["episode"] for text in (chapter["title"], chapter["repeated"])]
    pieces = [piece for chapter in first["episode"] for one in chapter["passages"] for piece in one["pieces"]]
    for found in (said, "\n".join([*titles, *heads, *(text for text, _ in pieces)])):
        assert "tokens, trained, version 6, mean log-probability -0.25, reward 0.5, calls multiply" in found
        assert "segment 2 of 2" in found and "begins as segment 1 does: 2 messages" in found
        assert "characters ..." in found and "x" * 3000 not in found, "long ones are folded"
    assert "before (batch 0, reward 0.00):\n" in said and "\x1b[" not in said, "no styles but on a terminal"
    assert any("<i>391</i>" in text for text, _ in pieces) and any(call for _, call in pieces)


def test_evaluation_comes_before_stored_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(run)
    example = {"problem": {"problem": "5 5 5=5"}, "answer": "5-5+5", "reward": 1}
    models = [
        {"model": name, "reward": reward, "solved": reward, "examples": [example]}
        for name, reward in (("initial", 0.25), ("trained", 0.75))
    ]
    (run / "evaluation.json").write_text(json.dumps({"models": models}))
    assert summary.main([str(run / "config.yaml")]) == 0
    said = capsys.readouterr().out
    assert "reward 0.250  solved 25.0%  initial" in said and "reward 0.750  solved 75.0%  trained" in said
    assert "5 5 5=5" in said and "8 6 4=2" not in said
    page = shown(run)
    assert page["models"] == [["initial", "0.250", "25.0%"], ["trained", "0.750", "75.0%"]]
    assert page["examples"]["before"][0]["answer"] == "5-5+5"


@pytest.mark.parametrize(("versions", "title"), [([0, 20], "Before and after: t"), ([10, 20], "T"), ([20], "Before")])
def test_the_first_evaluation_is_what_was_before(versions: list[int], title: str, run: Path) -> None:
    """One that a run began with later is called the first one. One alone is compared with nothing."""
    store(run)
    with closing(sqlite3.connect(run / "buffer.sqlite")) as db:
        db.execute(EVALUATIONS)
        for version in versions:
            kept = json.dumps({"aime": [{"problem": {"problem": "p"}, "answer": f"of {version}", "reward": 1.0}]})
            row = (version, "done", version, "rollout-0#t", 1, "", "{}", kept, 0.0)
            db.execute("INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        db.commit()
    assert summary.main([str(run)]) == 0
    page = shown(run)
    if len(versions) == 1:
        assert page["comparison"] == ["Before and after: the first and the last batch", ""]
    else:
        assert page["comparison"] == [f"{title}he first and the last evaluation", ""]
        assert list(page["examples"]) == [f"aime, version {version}" for version in versions]


def prune(run: Path, *batches: int) -> None:
    """Remove samples as the buffer does with older checkpoints."""
    with closing(sqlite3.connect(run / "buffer.sqlite")) as db:
        for batch in batches:
            db.execute("DELETE FROM samples WHERE item IN (SELECT item FROM items WHERE batch = ?)", [batch])
            db.execute("UPDATE items SET bytes = 0 WHERE batch = ?", [batch])
        db.commit()


def test_what_was_pruned_is_not_called_before(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(run)
    prune(run, 0)
    assert summary.main([str(run)]) == 0
    said = capsys.readouterr().out
    assert "Batch 39, the only one whose samples are stored\nThe answers before the training are not there: the" in said
    assert "batches 0 to 38 were removed with older checkpoints; buffer.keep: all keeps them" in said
    assert "before (" not in said and "samples (batch 39, reward 1.00)" in said
    prune(run, 39)
    assert summary.main([str(run)]) == 0
    assert "stored" not in capsys.readouterr().out and shown(run)["comparison"] == ["", ""]


def test_a_broken_ledger_hides_no_evaluation(run: Path) -> None:
    (run / "buffer.sqlite").write_text("no ledger, but long enough to be looked at " * 9)
    example = {"problem": {"problem": "5 5 5=5"}, "answer": "5-5+5", "reward": 1}
    models = [{"model": name, "reward": 1.0, "solved": 1.0, "examples": [example]} for name in ("initial", "trained")]
    (run / "evaluation.json").write_text(json.dumps({"models": models}))
    assert summary.main([str(run)]) == 0
    page = shown(run)
    assert page["comparison"][0] == "Before and after: evaluation.json" and "buffer.sqlite" in page["trouble"]


def test_a_broken_evaluation_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "evaluation.json").write_text('{"model": 3}')
    assert summary.main([str(run)]) == 2
    assert "evaluation.json: not what `python -m rollout evaluate` writes" in capsys.readouterr().err


def test_no_records_no_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    assert summary.main([str(run)]) == 1
    with pytest.raises(SystemExit) as ended:
        summary.main([str(run.parent)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "no records yet" in said and "no config.yaml" in said


def test_records_of_a_restored_version_replace_the_old_ones(run: Path) -> None:
    records = Records(run / "metrics.jsonl")
    assert len(records.ordered()) == 40 and records.read() == []
    assert records.column("reward/mean")[0] == list(range(1, 41))
    assert records.by_version[25]["reward/mean"] == 0.5 + 25 / 80
    assert records.column("length/mean")[0] == list(range(1, 21))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('ard/mean": 1.0}\nnot json\n')
    assert [record["version"] for record in records.read()] == [41]


def test_moving_mean_looks_back_only() -> None:
    assert moving_mean([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]


def test_no_file_no_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary.main([str(run)]) == 0
    said = capsys.readouterr().out
    assert "before (" not in said and "failed" not in said


def test_a_file_that_a_restarted_learner_replaced_is_read_again(run: Path) -> None:
    records = Records(run / "metrics.jsonl")
    records.read()
    kept = [record for record in records.ordered() if record["version"] <= 20]
    again = [*kept, {"version": 21, "reward/mean": 0.0}]
    (run / "new").write_text("".join(json.dumps(record) + "\n" for record in again))
    (run / "new").replace(run / "metrics.jsonl")
    assert records.read() == again[-1:] and records.read() == []


def test_evaluations_while_it_trained_are_a_curve_a_table_and_some_answers(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(run)
    with sqlite3.connect(run / "buffer.sqlite") as db:
        db.execute(EVALUATIONS)
        kept = {
            "aime": [{"problem": {"problem": f"held out {n}"}, "answer": f"answer {n}", "reward": 1.0} for n in "ab"]
        }
        for version in (0, 10, 20):
            row = (version, "done", version, "rollout-0#t", 1, "", "{}", json.dumps(kept), 0.0)
            db.execute("INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    db.close()
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")  # after the line that was cut off
        for version, mean in ((0, 0.25), (10, 0.5), (20, 0.75)):
            record = {
                "version": version + 1,
                "eval/version": version,
                "eval/aime/mean@4": mean,
                "eval/aime/pass@4": 0.9,
            }
            file.write(json.dumps(record) + "\n")
    assert summary.main([str(run / "config.yaml")]) == 0
    said = capsys.readouterr().out
    assert "version 0 evaluated while training on\n  aime: mean@4 0.250, pass@4 0.900" in said
    assert "version 20 evaluated while training on\n  aime: mean@4 0.750" in said and "version 10 eval" not in said
    page = shown(run)
    assert page["evaluations"][1] == {"version": 10, "figures": {"aime mean@4": 0.5, "aime pass@4": 0.9}}
    assert list(page["evaluated"]) == ["aime, version 0", "aime, version 20"]
    assert page["evaluated"]["aime, version 0"][0]["answer"] == "answer a"


def test_a_report_that_the_disk_does_not_take_leaves_the_earlier_one(run: Path) -> None:
    (run / "report.html").write_text("earlier")
    (run / f".report.html.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(WriteError, match=r"report\.html: No space left on device; make room on its disk"):
        summary.main([str(run)])
    assert (run / "report.html").read_text() == "earlier"
