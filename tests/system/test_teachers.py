"""Launched runs with teachers on a real vLLM, whose processes are killed while they work: the teachers' numbers are
transformers', and a kill costs time only."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer.wire.sample import Sample
from tests.harness.ports import free_port
from tests.harness.toy import ROOT, Run, Toy, python
from tests.system.test_run import audit, until

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1800)]
ENGINE = "{dtype: float32, kv_cache_memory_bytes: 67108864}"


@pytest.fixture(scope="module")
def teacher(toy: Toy) -> Path:
    """A model that was shown right answers only."""
    return shown(toy, "teacher", steps=2500)


def shown(toy: Toy, name: str, steps: int) -> Path:
    """Make a model that was shown so many batches of right answers."""
    folder, problems = toy.folder / name, toy.folder / "data" / "train.parquet"
    words = ("--problems", problems, "--out", folder, "--right-only", "--steps", steps, "--seed", "7")
    made = python("examples.countdown.make_model", *map(str, words), timeout_s=900)
    assert made.returncode == 0, made.stderr
    return folder


def launch(toy: Toy, name: str, *more: str) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "actors", "launch", *toy.settings(name, *more)]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def own(teacher: Path, port: int) -> list[str]:
    return [f"--teacher.model={teacher}", "--teacher.servers=1", f"--teacher.port={port}", f"--teacher.engine={ENGINE}"]


def of_two_sources(toy: Toy) -> tuple[Path, dict[str, str]]:
    """The problems, every second one of the source `second`; and by prompt the teacher of its source."""
    rows = pq.read_table(toy.folder / "data" / "train.parquet").to_pylist()
    for row in rows[::2]:
        row["data_source"] = "second"
    file = toy.folder / "two_sources.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    names = {"second": "second", "countdown": ""}
    return file, {row["prompt"][0]["content"]: names[row["data_source"]] for row in rows}


def two_ports() -> int:
    """The first of two free ports that follow each other, as the ports of a run's teacher servers do."""
    first, second = free_port(), free_port()
    while second != first + 1:
        first, second = second, free_port()
    return first


def servers(run: Run, word: str) -> list[psutil.Process]:
    """The teacher servers of a run, or its rollout server."""
    return [one for one in run.processes("rollout") if ("teacher" in one.cmdline()) == (word == "teachers")]


def samples_of(run: Run) -> list[Sample]:
    rows = run.query("select data_of(segment, position, samples.bytes) from items join samples using (item)")
    return [Sample.unpack(data) for (data,) in rows]


def by_transformers(folder: Path, sample: Sample) -> np.ndarray:
    """Log-probabilities of the sampled tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(sample.tokens.numpy()).long()
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    return logprobs.numpy()[sample.sampled.numpy()[1:] != 0]


def test_a_killed_teacher_costs_time_and_no_sample(toy: Toy, teacher: Path) -> None:
    """SIGKILL to the teacher server: groups wait for its restart, and each sample has its teacher's own numbers."""
    run, versions, port = toy.run("teacher-killed"), 24, free_port()
    with launch(
        toy, "teacher-killed", f"--run.versions={versions}", "--rollout.attempts=1", *own(teacher, port)
    ) as launcher:
        try:
            until(lambda: len(run.metrics()) >= 3, "third version")
            (server,) = [process for process in run.processes("rollout") if "teacher" in process.cmdline()]
            children = server.children(recursive=True)
            server.kill()
            assert not psutil.wait_procs(children, timeout=120)[1]
            version = len(run.metrics())
            shown = python("actors", "status", run.path).stdout
            assert f"teacher server teacher-0 ({teacher}) at http://127.0.0.1:{port}: does not answer" in shown
            until(lambda: len(run.metrics()) > version + 6, "version by the new teacher server")
            output, _ = launcher.communicate(timeout=900)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, output[-4000:]
    assert [record["version"] for record in run.metrics()] == list(range(1, versions + 1))
    assert "--- teacher-0 failed: exit code 137" in run.log("teacher-0")
    assert run.log("teacher-0").count("--- teacher-0 started") == 2
    assert "scoring waits for a teacher server at" in run.log("rollout-0")
    assert run.query("select item from items where state = 'dropped' or attempts > 1") == []
    samples = samples_of(run)
    assert len(samples) >= versions * 16
    for sample in samples:
        assert sample.teacher_logprobs is not None and sample.teacher == ""
        assert (sample.teacher_logprobs.numpy()[sample.sampled.numpy() != 0] < 0).any()
    for sample in samples[:: len(samples) // 20]:
        found = sample.teacher_logprobs.numpy()[sample.sampled.numpy() != 0]  # type: ignore[union-attr]
        np.testing.assert_allclose(found, by_transformers(teacher, sample), atol=2e-3)
    assert all(record["teacher/share"] == 1.0 for record in run.metrics())
    assert run.left_behind() == []


def test_of_two_teachers_each_teaches_its_source_whatever_is_killed(toy: Toy) -> None:
    """SIGKILL to rollout server, buffer, learner and both teacher servers: each sample has the numbers of its row's
    teacher. The second teacher is the policy that the run begins with."""
    run, versions, port, teacher = toy.run("two-teachers"), 64, two_ports(), shown(toy, "hasty", steps=15)
    file, teachers = of_two_sources(toy)
    folders = {"": teacher, "second": toy.folder / "model"}
    second = f"{{data_source: second, model: {folders['second']}, servers: 1, engine: {ENGINE}}}"
    more = [f"--run.versions={versions}", f"--data.train={file}", f"--teacher.by_source=[{second}]"]
    with launch(toy, "two-teachers", *more, *own(teacher, port)) as launcher:
        try:
            for kill in ("server", "buffer", "learner", "teachers"):
                done = len(run.metrics())
                until(
                    lambda done=done: len(run.metrics()) > done + 2 or launcher.poll() is not None,  # type: ignore[misc]
                    f"version before the kill of {kill}",
                )
                assert launcher.poll() is None, launcher.communicate()[0][-4000:]
                victims = run.processes(kill) if kill in ("buffer", "learner") else servers(run, kill)
                assert len(victims) == (2 if kill == "teachers" else 1)
                for victim in victims:
                    victim.kill()
            output, _ = launcher.communicate(timeout=1200)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, output[-4000:]
    audit(run, versions, groups=4, staleness=4)
    tokenizer, samples = AutoTokenizer.from_pretrained(teacher), samples_of(run)
    assert len(samples) >= versions * 16
    for number, sample in enumerate(samples):
        sampled = sample.sampled.numpy() != 0
        name = teachers[tokenizer.decode(sample.tokens.numpy()[: sampled.argmax()])]
        assert sample.teacher == name and sample.teacher_logprobs is not None
        found = sample.teacher_logprobs.numpy()[sampled]
        assert (found < 0).any()
        if number % (len(samples) // 20) < 2:
            np.testing.assert_allclose(found, by_transformers(folders[name], sample), atol=2e-3)
    assert {sample.teacher for sample in samples} == {"", "second"}
    assert all(record["teacher/share"] == 1.0 for record in run.metrics())
    keys = {key for record in run.metrics() for key in record}
    assert keys >= {"teacher/second/reverse_kl", "teacher/other/reverse_kl"}
