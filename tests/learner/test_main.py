"""The learner's command with a canned buffer: one rank and two, signals, killed processes, refused run files.

Ranks are forked with everything imported; `python -m learner`, which starts its ranks itself, is in the long tests."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from buffer.wire.protocol import Finished, Hello, Rewind, Take, Trained
from buffer.wire.sample import Sample
from configs.certificate import FILE, Certificate, judged
from configs.certificate import read as read_certificate
from configs.checkpoint_files import complete
from configs.load import ConfigError
from configs.schema import Config
from learner.__main__ import image_format, main
from learner.certify import process
from learner.record.metrics import read
from learner.train.pictures import max_sample_patches
from tests.harness.canned import Canned
from tests.harness.demonstrated import chatml_model
from tests.harness.forked_learner import ForkedLearner, ranks_meeting_in
from tests.harness.keys import give_keys
from tests.harness.pictured import seeing_model
from tests.harness.world import ROOT, make_samples, tiny_model


def command(tmp_path: Path, address: str, **learner) -> list[str]:
    """The command line of a run in `tmp_path`."""
    config = {
        "run": {"name": "run", "folder": str(tmp_path), "versions": 3},
        "model": {"path": tiny_model(tmp_path / "model").path, "dtype": "float32"},
        "data": {"train": "none.parquet", "max_prompt_tokens": 8},
        "reward": {"function": "countdown"},
        "sampling": {"max_tokens": 30},
        "learner": {"device": "cpu", "threads": 1, "tokens_per_microbatch": 64, "checkpoint_every": 2} | learner,
        "buffer": {"address": address},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    give_keys(tmp_path / "run")
    return [sys.executable, "-m", "learner", str(tmp_path / "run.yaml")]


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[[list[str], int], list[ForkedLearner]]]:
    """Start the ranks of a command; they end with the test."""
    with ExitStack() as stack:

        def begin(line: list[str], ranks: int = 1) -> list[ForkedLearner]:
            meeting: list[dict[str, str]] = [{}]
            if ranks > 1:
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                stack.callback(lambda: store)  # lives as long
                meeting = ranks_meeting_in(store, ranks)
            started = []
            for rank, environment in enumerate(meeting):
                started.append(ForkedLearner(line[3:], tmp_path / f"rank{rank}.log", environment))
                stack.callback(started[-1].kill)
            return started

        yield begin


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_a_run_of_one_rank(tmp_path: Path, fork) -> None:
    with Canned(batches=3) as buffer:
        (rank,) = fork(command(tmp_path, buffer.address))
        code, errors = rank.ended()
    assert code == 0, errors
    assert [record["version"] for record in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert complete(tmp_path / "run" / "checkpoints") == [2, 3]
    assert (tmp_path / "run" / "checkpoints" / "v000003" / "huggingface" / "model.safetensors").exists()
    assert [(m.version, m.oldest_kept) for m in buffer.requests if isinstance(m, Trained)] == [(0, 0), (1, 0), (2, 2)]
    assert next(m for m in buffer.requests if isinstance(m, Hello)).serves.startswith("tcp://127.0.0.1:")
    certificate = read_certificate(tmp_path / "run" / FILE)
    assert certificate is not None and certificate.faults == []
    assert [check.verdict for check in certificate.checks] == ["holds"] * 19


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_demonstrations_are_trained_beside_the_batches_and_may_not_change(tmp_path: Path, fork) -> None:
    """The checkpoint notes their place, so a resumed run is refused if they are others."""
    file, line = tmp_path / "shown.jsonl", command(tmp_path, "")
    rows = [{"problem": "ab", "answer": letter} for letter in "abcde"]
    chatml_model(tmp_path / "model")
    given = yaml.safe_load((tmp_path / "run.yaml").read_text())
    given["data"] |= {"chat_template": "none", "demonstrations": {"path": str(file), "share": 0.3}}
    given["batch"] = {"groups": 2, "samples": 2}
    for text, exit_code in (("ab", 0), ("ba", 2)):
        file.write_text("".join(json.dumps(row | {"problem": text}) + "\n" for row in rows))
        with Canned(batches=2) as buffer:
            given["buffer"] = {"address": buffer.address}
            given["run"]["versions"] = 2
            (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
            (rank,) = fork(line)
            code, errors = rank.ended()
        assert code == exit_code, errors
    records = read(tmp_path / "run" / "metrics.jsonl")
    assert [record["demonstrations/rows"] for record in records] == [2, 2]
    assert [record["demonstrations/epoch"] for record in records] == [0.4, 0.8]
    assert "data.demonstrations: the demonstrations, in tokens and pixels, are not those with which" in errors


@pytest.mark.xdist_group("ranks")
def test_the_exit_code_says_how_the_run_ended(tmp_path: Path, fork) -> None:
    """The first of two ranks prints why; the last version is saved first."""
    with Canned(batches=1, finished=Finished(outcome="data", why="the data ended after version 1 of 3")) as buffer:
        ranks = fork(command(tmp_path, buffer.address, ranks=2), 2)
        ended = [rank.ended() for rank in ranks]
    assert [code for code, _ in ended] == [3, 3], ended
    why = "python -m learner: the data ended after version 1 of 3\n"
    assert [errors.count(why) for _, errors in ended] == [1, 0]
    assert complete(tmp_path / "run" / "checkpoints") == [1]


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_every_rank_refuses_what_rank_0_alone_finds(tmp_path: Path, fork) -> None:
    """Nothing ends the ranks from above, as under torchrun on several nodes."""
    with Canned(batches=1) as buffer:
        ranks = fork([*command(tmp_path, buffer.address, ranks=2), "--weights.host=192.0.2.1"], 2)
        ended = [rank.ended() for rank in ranks]
    assert [code for code, _ in ended] == [2, 2], ended
    lines = [errors.splitlines()[-1] for _, errors in ended]
    assert lines[0] == lines[1] and lines[0].startswith("python -m learner: weights.host: 192.0.2.1 is no address of ")


@pytest.mark.xdist_group("ranks")
def test_every_rank_ends_where_one_has_no_keys(tmp_path: Path) -> None:
    """As on a node that lacks them, and nothing ends the ranks from above: before, the others waited for it."""
    line = command(tmp_path, "tcp://192.0.2.1:9", ranks=2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        ForkedLearner([*line[3:], f"--run.folder={tmp_path / folder}"], tmp_path / f"rank{number}.log", meeting)
        for number, (folder, meeting) in enumerate(zip(("", "other"), ranks_meeting_in(store, 2), strict=True))
    ]
    try:
        ended = [rank.ended() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [code for code, _ in ended] == [2, 2], ended
    lines = [errors.splitlines()[-1] for _, errors in ended]
    assert lines[0] == lines[1] and str(tmp_path / "other" / "run" / "keys") in lines[0], lines


@pytest.mark.xdist_group("ranks")
def test_two_ranks_drain_and_resume(tmp_path: Path, fork) -> None:
    """Two ranks drain while they wait for batch 1; the next start resumes from the checkpoint."""
    for start, batches in enumerate((1, 2)):
        with Canned(batches=batches) as buffer:
            ranks = fork(command(tmp_path, buffer.address, ranks=2), 2)
            assert buffer.waiting.wait(300)
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
            ended = [rank.ended() for rank in ranks]
        assert [code for code, _ in ended] == [0, 0], ended
        assert [errors.count("finishing this version") for _, errors in ended] == [1, 1]
        s = r"[\d.]+ s"
        phases = f"started in {s}: {s} imports, {s} certificate, {s} model and optimizer; waiting for"
        assert [len(re.findall(phases, errors)) for _, errors in ended] == [1, 1]
        made = [errors.count("certificate: packed documents = alone: ") for _, errors in ended]
        assert made == [1 - start, 0], "rank 0 has one made at the first start alone"
        assert complete(tmp_path / "run" / "checkpoints") == [1, 2][: start + 1]
        assert next(m for m in buffer.requests if isinstance(m, Rewind)).version == start
    assert [record["version"] for record in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_two_ranks_that_share_rows_take_the_same_part(tmp_path: Path, fork) -> None:
    """The certificate compares such rows too, and each sample counts once."""
    with Canned(batches=1, finished=Finished(outcome="data", why="the data ended")) as buffer:
        ranks = fork(command(tmp_path, buffer.address, ranks=2, context_parallel=2), 2)
        ended = [rank.ended() for rank in ranks]
    assert [code for code, _ in ended] == [3, 3], ended
    asked = [m for m in buffer.requests if isinstance(m, Take)]
    assert {(m.rank, m.world) for m in asked} == {(0, 1)} and len(asked) == 4
    assert [m.version for m in buffer.requests if isinstance(m, Trained)] == [0, 0]
    certificate = read_certificate(tmp_path / "run" / FILE)
    assert certificate is not None and certificate.faults == []
    split = [check for check in certificate.checks if check.what.startswith("two ranks, one row: ")]
    assert len(split) == 10 and {check.verdict for check in split} == {"holds"}
    (record,) = read(tmp_path / "run" / "metrics.jsonl")
    samples = [Sample.unpack(entry.sample) for entry in make_samples(0)]
    assert record["samples"] == len(samples)
    assert record["tokens"] == sum(len(sample.tokens.numpy()) for sample in samples)
    assert record["tokens_sampled"] < record["tokens_computed"] <= record["tokens"]
    assert record["tokens_sampled"] == sum(int(sample.sampled.numpy().sum()) for sample in samples)


@pytest.mark.xdist_group("ranks")
def test_a_run_with_a_critic_drains_and_resumes(tmp_path: Path, fork) -> None:
    """The policy stays as it is in version 1, the critic's warm-up, and both go on from the checkpoint."""
    keys = ["advantage=gae", "critic.warmup_versions=1", "critic.learning_rate=1e-3"]
    for batches in (1, 3):
        with Canned(batches=batches) as buffer:
            (rank,) = fork([*command(tmp_path, buffer.address), *(f"--algorithm.{key}" for key in keys)])
            if batches == 1:
                assert buffer.waiting.wait(300)
                rank.send_signal(signal.SIGTERM)
            code, errors = rank.ended()
        assert code == 0, errors
        assert errors.count("critic warm-up: from version 0 to 1 the critic learns") == (batches == 1)
    records = list(read(tmp_path / "run" / "metrics.jsonl"))
    assert [record["version"] for record in records] == [1, 2, 3]
    assert records[0]["lr"] == 0 < records[1]["lr"] and all(record["critic/lr"] == 1e-3 for record in records)
    assert complete(tmp_path / "run" / "checkpoints")[-1] == 3


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], subprocess.Popen]]:
    """Starts processes that do not outlive the test."""
    with ExitStack() as stack:

        def begin(line: list[str]) -> subprocess.Popen:
            process = stack.enter_context(subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        yield begin


def ended(process: subprocess.Popen) -> tuple[int, str]:
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors


@pytest.mark.long
def test_ranks_of_the_command_say_how_the_run_ended(tmp_path: Path, start) -> None:
    """The command starts its two ranks itself."""
    with Canned(batches=1, finished=Finished(outcome="data", why="the data ended after version 1 of 3")) as buffer:
        code, errors = ended(start(command(tmp_path, buffer.address, ranks=2)))
    assert code == 3, errors
    assert errors.count("python -m learner: the data ended after version 1 of 3\n") == 1
    assert "failed first" not in errors and complete(tmp_path / "run" / "checkpoints") == [1]


@pytest.mark.xdist_group("ranks")
def test_a_run_whose_steps_are_all_skipped_fails(tmp_path: Path, fork) -> None:
    """A weight that is not a number: exit code 4 with the cause; the versions are still recorded and saved. No group is
    at fault, so none is reported."""
    with Canned(batches=3) as buffer:
        line = command(tmp_path, buffer.address)
        weights = load_file(tmp_path / "model" / "model.safetensors")
        weights["model.norm.weight"][0] = float("nan")
        save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
        (rank,) = fork(line)
        code, errors = rank.ended()
    assert code == 4, errors
    last = errors.splitlines()[-1]
    assert last.startswith("python -m learner: the run ended at version 3 without a result: the last 3 steps were all")
    assert [record["gradient/skipped"] for record in read(tmp_path / "run" / "metrics.jsonl")] == [1, 1, 1]
    assert complete(tmp_path / "run" / "checkpoints") == [2, 3]


@pytest.mark.long
@pytest.mark.timeout(1800)  # three starts of two ranks
def test_two_ranks_drain_die_and_resume(tmp_path: Path, start) -> None:
    """Drained while it waits for batch 1; then a rank is killed, then the parent."""
    with Canned(batches=1) as buffer:
        process = start(command(tmp_path, buffer.address, ranks=2))
        assert buffer.waiting.wait(300)
        process.send_signal(signal.SIGTERM)
        code, errors = ended(process)
    assert code == 0, errors
    assert errors.count("finishing this version") == 2
    assert complete(tmp_path / "run" / "checkpoints") == [1]
    with Canned(batches=1) as buffer:
        process = start(command(tmp_path, buffer.address, ranks=2))
        assert buffer.waiting.wait(300)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        os.kill(ranks[1].pid, signal.SIGKILL)
        code, errors = ended(process)
        assert code == 128 + signal.SIGKILL and "rank 1 failed first (exit code -9)" in errors
        assert not psutil.wait_procs(ranks, 0)[1]
    assert next(m for m in buffer.requests if isinstance(m, Rewind)).version == 1
    with Canned(batches=1) as buffer:
        process = start(command(tmp_path, buffer.address, ranks=2))
        assert buffer.waiting.wait(300)
        ranks = psutil.Process(process.pid).children()
        process.kill()
        process.communicate(timeout=240)
        assert not psutil.wait_procs(ranks, 60)[1]


@pytest.mark.parametrize(
    ("learner", "problem"),
    [
        ({"attention": "varlen", "device": "auto"}, "learner.attention"),
        ({"lrr": 1}, "learner.lrr"),
    ],
)
def test_refused_run_files(tmp_path: Path, learner: dict, problem: str, capsys) -> None:
    assert problem in refused(command(tmp_path, "tcp://127.0.0.1:9", **learner), capsys)


@pytest.mark.long
def test_the_command_exits_with_2_if_it_refuses(tmp_path: Path, start) -> None:
    code, errors = ended(start(command(tmp_path, "tcp://127.0.0.1:9", lrr=1)))
    assert code == 2
    assert "learner.lrr" in errors and "Traceback" not in errors


def refused(line: list[str], capsys) -> str:
    """Return the line with which `main`, called in this process, refuses a command."""
    try:
        code: int | str | None = main(line[3:])
    except SystemExit as error:
        code = error.code
    assert code == 2
    problem = capsys.readouterr().err
    assert "Traceback" not in problem
    return problem


def test_an_unknown_model_is_refused(tmp_path: Path, capsys) -> None:
    line = command(tmp_path, "tcp://127.0.0.1:9")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    assert "model.path" in refused(line, capsys)


def test_a_model_whose_certificate_fails_is_refused(tmp_path: Path, capsys, monkeypatch) -> None:
    line, path = command(tmp_path, "tcp://127.0.0.1:9"), str(tmp_path / "model")
    check = judged("two ranks = one", 1.0, 1e-4, fault="its Qwen2Attention (layers.0.self_attn) differs")
    made = Certificate(model=path, kind="qwen2", checks=(check,), remedy="take another")
    monkeypatch.setattr(process, "made", lambda model, share, splits, served: made)
    problem = refused(line, capsys)
    why = "two ranks = one: its Qwen2Attention (layers.0.self_attn) differs; take another"
    assert f"python -m learner: model.path: {path} (qwen2): {why}\n" in problem
    assert read_certificate(tmp_path / "run" / FILE) == made


def test_another_vision_architecture_is_refused(tmp_path: Path, capsys) -> None:
    """By name, before anything starts."""
    line = command(tmp_path, "tcp://127.0.0.1:9")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "mllama"}))
    problem = refused(line, capsys)
    assert "model.path" in problem and "mllama" in problem and "attend to images alone" in problem


def test_a_text_model_has_nothing_to_freeze(tmp_path: Path) -> None:
    model, data = tiny_model(tmp_path).model_dump() | {"freeze": ["vision"]}, {"train": "x"}
    config = Config.model_validate({"model": model, "data": data, "reward": {"function": "x"}})
    with pytest.raises(ConfigError, match=r"model.freeze: \[vision\]: .* is no vision-language model; remove the key"):
        image_format(config)


def test_patches_of_a_sample_are_bounded_by_tokens_and_images(tmp_path: Path) -> None:
    model = seeing_model(tmp_path, "qwen2_5_vl")
    for tokens, images, want in ((1000, 8, 3 * 4 * 1337), (10**5, 2, 2 * 4 * 1337)):
        data = {"train": "x", "max_prompt_tokens": tokens, "max_pixels": 1337 * 784, "max_images": images}
        sampling = {"max_tokens": 3 * 1337 - 1000 if images == 8 else 1}
        given = {"model": model.model_dump(), "data": data, "sampling": sampling, "reward": {"function": "x"}}
        config = Config.model_validate(given)
        assert max_sample_patches(config, image_format(config)) == want
    strip = config.model_copy(update={"data": config.data.model_copy(update={"max_pixels": 50_176})})
    assert max_sample_patches(strip, image_format(strip)) == 2 * 4 * 113, "of 20 x 4,000 pixels"
