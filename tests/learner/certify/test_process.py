"""A run needs a certificate that holds. It is made once for a model and code, and kept in the run's folder."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from configs.certificate import FILE, Certificate, Check, judged, read, write
from configs.load import ConfigError
from configs.schema import Config, ModelConfig
from learner.certify import certifier, process
from learner.certify.certifier import key_of
from learner.certify.ranks import Pair
from learner.model import loading
from learner.model.shrink import small
from tests.harness.world import tiny_model


def run_of(folder: Path, **learner: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"folder": str(folder / "runs"), "name": "toy"},
            "model": tiny_model(folder / "model").model_dump(),
            "data": {"train": "none.parquet"},
            "reward": {"function": "countdown"},
            "learner": learner,
        }
    )


def key(config: Config) -> str:
    model = config.model
    return key_of(loading.read_config(model), config.learner.share_prompts, model.trust_remote_code)


class Maker:
    """In place of the processes that make certificates: gives each one these checks."""

    def __init__(self, monkeypatch: Any, *checks: Check, refused: str = "") -> None:
        self.asked, self.checks, self.refused = 0, checks, refused
        monkeypatch.setattr(process, "made", self)

    def __call__(self, model: ModelConfig, share: bool, splits: bool = False, served: bool = True) -> Certificate:
        self.asked += 1
        found = key_of(loading.read_config(model), share, model.trust_remote_code, splits, served)
        checks = {"checks": self.checks, "refused": self.refused, "remedy": "take another"}
        return Certificate(model=model.path, kind="qwen2", key=found, **checks)


HOLDS = judged("packed = alone", 1e-6, 1e-4)
WRONG = judged("packed = alone", 2.0, 1e-4, fault="its Qwen2Attention (layers.0.self_attn) differs")


def test_a_certificate_is_made_once_and_kept(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    config, maker = run_of(tmp_path), Maker(monkeypatch, HOLDS)
    with caplog.at_level("INFO"):
        process.require(config)
        table = [line for line in caplog.messages if "packed = alone" in line]
        process.require(config)
    assert table == ["certificate: packed = alone: 1.0e-06 nat (limit 1.0e-04), holds"]
    assert maker.asked == 1, "a resume makes none"
    begun = [line for line in caplog.messages if "which may take a minute" in line]
    assert begun == caplog.messages[:1], "only a certificate that is made takes time"
    kept = read(config.run.path / FILE)
    assert kept is not None and kept.checks == (HOLDS,)
    assert sum("1 of 1 comparisons of qwen2 hold" in line for line in caplog.messages) == 2


@pytest.mark.parametrize("change", ["model", "sharing", "ranks", "software", "code", "damage"])
def test_another_model_or_code_needs_another_certificate(change: str, tmp_path: Path, monkeypatch: Any) -> None:
    config, maker = run_of(tmp_path), Maker(monkeypatch, HOLDS)
    process.require(config)
    if change == "model":
        text = (tmp_path / "model" / "config.json").read_text()
        (tmp_path / "model" / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    elif change == "sharing":
        config = run_of(tmp_path, share_prompts=False)
    elif change == "ranks":
        config = run_of(tmp_path, ranks=2, context_parallel=2)
    elif change == "software":
        monkeypatch.setattr(certifier, "software", lambda: {"transformers": "99"})
    elif change == "code":
        (tmp_path / "learner").mkdir()
        (tmp_path / "learner" / "new.py").write_text("x = 1")
        monkeypatch.setattr(certifier, "ROOT", tmp_path)
    else:
        (config.run.path / FILE).write_text("{")
    process.require(config)
    assert maker.asked == 2


@pytest.mark.parametrize("starts", [1, 2])
def test_a_fault_refuses_the_run_at_every_start(starts: int, tmp_path: Path, monkeypatch: Any) -> None:
    """In one line that names the folder, the type of the layer and the remedy; the file says the same."""
    config, maker = run_of(tmp_path), Maker(monkeypatch, HOLDS, WRONG)
    for _ in range(starts):
        with pytest.raises(ConfigError) as refused:
            process.require(config)
    (line,) = refused.value.problems
    assert line.startswith(f"model.path: {config.model.path} (qwen2): packed = alone: its Qwen2Attention (layers.0.")
    assert line.endswith("; take another") and maker.asked == starts, "it may have been a fault of the machine"


def test_a_refused_model_is_named_as_the_doctor_names_it(tmp_path: Path, monkeypatch: Any) -> None:
    config, _ = run_of(tmp_path), Maker(monkeypatch, refused="it has layers of type conv")
    with pytest.raises(ConfigError) as refused:
        process.require(config)
    assert [*refused.value.problems] == [f"model.path: {config.model.path} (qwen2): it has layers of type conv"]


def test_a_certificate_of_before_with_the_same_key_is_not_made_again(tmp_path: Path, monkeypatch: Any) -> None:
    config, maker = run_of(tmp_path), Maker(monkeypatch, HOLDS)
    config.run.path.mkdir(parents=True)
    write(Certificate(model="m", kind="qwen2", key=key(config), checks=(HOLDS,)), config.run.path / FILE)
    process.require(config)
    assert maker.asked == 0


@pytest.mark.parametrize(
    ("environment", "leads"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "3"}, False),
        ({"NODE_RANK": "1"}, False),
        ({"NODE_RANK": "0"}, True),
        ({"RANK": "8", "NODE_RANK": "1"}, False),
    ],
)
def test_one_process_of_a_learner_makes_it(environment: dict[str, str], leads: bool) -> None:
    assert process.leads(environment) == leads


FAKE = """
def __getattr__(name):
    def kernel(*args, **kwargs):
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    kernel.__name__ = name
    return kernel
"""
"""A package of kernels that fails on a CPU, as those of flash-linear-attention do."""
COMMAND = """
import sys
from configs.schema import LearnerConfig, ModelConfig
from learner.certify.process import checked
from learner.model.memory import estimate
checked(model := ModelConfig(path=sys.argv[1]), True)
estimate(model, LearnerConfig(), 1)  # here kernels are not hidden: the learner itself will take them
from transformers.models.qwen3_5 import modeling_qwen3_5
try:
    modeling_qwen3_5.torch_chunk_gated_delta_rule(None)
except ValueError:
    raise SystemExit(7)
"""


def test_kernels_of_gpus_are_not_taken_where_a_model_is_tried_without_one(tmp_path: Path) -> None:
    """Whoever has flash-linear-attention installed starts a Qwen3.5 as well as before, and trains it with it."""
    kernels = tmp_path / "site" / "fla"
    for folder in (kernels, kernels / "ops", kernels / "ops" / "gated_delta_rule", kernels / "modules"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(FAKE)
    small(AutoConfig.for_model("qwen3_5_text")).save_pretrained(tmp_path / "model")
    path = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(tmp_path / "model")],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr[-2000:]


def strange(model: ModelConfig, *given: bool) -> str:
    raise EOFError(f"no such\nlayer in {len(given)}")


def dies(model: ModelConfig, *given: bool) -> str:
    os._exit(9)


def test_an_error_that_nobody_knows_refuses_the_model_in_one_line() -> None:
    """Code of transformers, or a model's own, may raise anything."""
    with pytest.raises(ConfigError) as caught:
        process._forked(strange, ModelConfig(path="m"), (True,), 60.0)
    (line,) = caught.value.problems
    assert line.startswith("model.path: m: it cannot be tried (EOFError: no such layer in 1); take a model of a type")


def killed(model: ModelConfig, *given: bool) -> str:
    os.kill(os.getpid(), signal.SIGKILL if given[0] else signal.SIGXCPU)  # nobody handles it
    return ""


def without_memory(model: ModelConfig, *given: bool) -> str:
    if given[0]:
        raise MemoryError
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


UNWRITTEN = "the small copy for its certificate cannot be written"


def without_room(model: ModelConfig, *given: bool) -> str:
    if given[0]:
        raise OSError(errno.ENOSPC, "No space left on device", f"{tempfile.gettempdir()}/copy/config.json")
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def without_a_writable_cache(model: ModelConfig, *given: bool) -> str:
    raise OSError(errno.EROFS, "Read-only file system", "/cache/modules/own.py")


def waits(model: ModelConfig, *given: bool) -> str:
    time.sleep(60)
    return ""


@pytest.mark.parametrize(
    ("target", "given", "limit_s", "words"),
    [
        (dies, True, 60.0, "the process that makes its certificate ended with exit code 9"),
        (killed, False, 60.0, "the process that makes its certificate was ended by SIGXCPU"),
        (
            killed,
            True,
            60.0,
            "the process that makes its certificate was ended by SIGKILL, as the kernel does when m",
        ),
        (without_memory, True, 60.0, "memory is short while its certificate is made (MemoryError: ); free memory"),
        (without_memory, False, 60.0, "memory is short while its certificate is made (RuntimeError: DefaultCPU"),
        (
            without_room,
            True,
            60.0,
            f"{UNWRITTEN}: {tempfile.gettempdir()}/copy/config.json: No space left on device; make room on its disk",
        ),
        (
            without_a_writable_cache,
            True,
            60.0,
            "a file for its certificate cannot be written: /cache/modules/own.py: Read-only file system; make it "
            "writable, or name another place",
        ),
        (without_room, False, 60.0, f"{UNWRITTEN}: {tempfile.gettempdir()}: No space left on device; make room"),
        (waits, True, 0.2, "its certificate was not made in 0.2 s; start again on a machine that is less busy"),
    ],
)
def test_the_end_of_its_process_is_named_and_not_blamed_on_the_model(
    target: Any, given: bool, limit_s: float, words: str
) -> None:
    with pytest.raises(process.NoCertificate, match=re.escape(f"model.path: m: {words}")) as error:
        process._forked(target, ModelConfig(path="m"), (given,), limit_s)
    assert "\n" not in str(error.value)


def of_a_killed_rank(model: ModelConfig, *given: bool) -> str:
    with Pair(multiprocessing.get_context("fork"), process.prepare) as pair:
        pair.start()
        for rank, _ in pair._ranks:
            os.kill(rank.pid or 0, signal.SIGKILL if given[0] else signal.SIGXCPU)  # nobody handles it
        return pair.ask(model, [[], []])[0].error


def test_a_rank_that_is_killed_for_its_memory_is_no_fault_of_the_model() -> None:
    model, words = ModelConfig(path="m"), "memory is short while its certificate is made (RankKilled: a rank was killed"
    with pytest.raises(process.NoCertificate, match=re.escape(words)):
        process._forked(of_a_killed_rank, model, (True,), 60.0)
    said = process._forked(of_a_killed_rank, model, (False,), 60.0)
    assert said == "the process of a rank was ended by SIGXCPU"
