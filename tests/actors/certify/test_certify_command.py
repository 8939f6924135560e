"""`python -m actors certify`: its table, exit codes and file."""

import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoConfig

from actors.__main__ import main
from actors.certify import command
from configs.certificate import Certificate, Check, judged, read
from configs.load import ConfigError
from configs.schema import ModelConfig
from configs.writing import WriteError
from learner.certify import process
from tests.harness.certified import tiny_config
from tests.harness.pictured import seeing_model
from tests.harness.world import ROOT

HOLDS = judged("packed documents = alone", 3e-6, 1e-4)
SKIPPED = Check(what="shared prompt = unshared", note="the model has a sliding window of 8")
WRONG = judged("two ranks = one", 0.5, 1e-4, fault="its LlamaAttention (layers.0.self_attn) differs")


def certificate(*checks: Check, refused: str = "") -> Certificate:
    sizes = {"copy_of": "2 layers, 64 wide, 0.1 M parameters", "remedy": "take another"}
    return Certificate(model="m", kind="llama", checks=checks, refused=refused, **sizes)


def test_the_table_has_figures_limits_and_verdicts() -> None:
    text = StringIO()
    command.show(certificate(HOLDS, SKIPPED, WRONG), Console(file=text, width=150, highlight=False))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert lines[0].startswith("compared largest difference limit")
    assert lines[1:4] == [
        "packed documents = alone 3.0e-06 nat 1.0e-04 holds",
        "shared prompt = unshared not compared the model has a sliding window of 8",
        "two ranks = one 5.0e-01 nat 1.0e-04 FAULT its LlamaAttention (layers.0.self_attn) differs",
    ]
    assert lines[4].startswith("small copy: 2 layers")
    assert lines[5].startswith("certificate: 1 of 2 comparisons of llama hold")
    assert lines[6] == "certificate: two ranks = one: its LlamaAttention (layers.0.self_attn) differs; take another"


@pytest.mark.parametrize(
    ("found", "code"),
    [(certificate(HOLDS), 0), (certificate(HOLDS, WRONG), 2), (certificate(refused="it has layers of type conv"), 2)],
)
def test_the_exit_code_says_whether_it_holds(
    found: Certificate, code: int, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(process, "made", lambda model, share: found)
    assert main(["certify", "m", "--out", str(tmp_path / "c.json")]) == code
    assert read(tmp_path / "c.json") == found
    assert "certificate: " in capsys.readouterr().out


def test_the_certificate_is_written_though_the_table_s_reader_has_left(tmp_path: Path, monkeypatch: Any) -> None:
    def leave(certificate: Certificate) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(process, "made", lambda model, share: certificate(HOLDS))
    monkeypatch.setattr(command, "show", leave)
    assert main(["certify", "m", "--out", str(tmp_path / "c.json")]) == 128 + signal.SIGPIPE
    assert read(tmp_path / "c.json") == certificate(HOLDS)


def test_a_certificate_that_fills_the_disk_is_still_shown(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(process, "made", lambda model, share: certificate(HOLDS))
    (tmp_path / f".c.json.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(WriteError, match=r"c\.json: No space left on device; make room on its disk"):
        command.main(["m", "--out", str(tmp_path / "c.json")])
    assert "certificate: " in capsys.readouterr().out


def test_flags_reach_the_model(monkeypatch: Any) -> None:
    asked = []
    monkeypatch.setattr(process, "made", lambda model, share: asked.append((model, share)) or certificate(HOLDS))
    assert command.main(["a/b", "--no-shared-prompts", "--trust-remote-code", "--text-alone"]) == 0
    ((model, share),) = asked
    assert (model.path, model.trust_remote_code, model.text_alone, share) == ("a/b", True, True, False)


def test_the_text_of_a_text_model_is_no_part_of_it(tmp_path: Path, capsys: Any) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    assert command.main([str(tmp_path), "--text-alone"]) == 2
    line = f"--text-alone: {tmp_path} (llama) is no multimodal model; leave it out\n"
    assert capsys.readouterr().err == line


@pytest.mark.long
def test_the_command_certifies_a_model_that_sees_on_text_alone(tmp_path: Path) -> None:
    """As each start of a run with `model.text_alone`: images are not compared."""
    model = seeing_model(tmp_path, "qwen3_vl")
    done = certified(model.path, "--text-alone", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(tmp_path / "out.json")
    assert found is not None and found.checks
    assert not [check.what for check in found.checks if "image" in check.what]


def test_what_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def refuse(model: Any, share: bool) -> Certificate:
        raise ConfigError([f"model.path: {model.path}: has no config.json"])

    def end(model: Any, share: bool) -> Certificate:
        raise process.NoCertificate("the process that certifies m ended")

    monkeypatch.setattr(process, "made", refuse)
    assert command.main(["nowhere"]) == 2
    assert "nowhere: has no config.json" in capsys.readouterr().err
    monkeypatch.setattr(process, "made", end)
    assert command.main(["m"]) == 1
    assert capsys.readouterr().err == "python -m actors certify: the process that certifies m ended\n"
    assert command.main(["m", "--out", str(tmp_path / "no" / "c.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def certified(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "actors", "certify", *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.long
def test_the_command_certifies_a_folder_without_weights(tmp_path: Path) -> None:
    tiny_config("qwen3", sliding_window=None).save_pretrained(tmp_path)
    done = certified(str(tmp_path), "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    assert "19 of 19 comparisons of qwen3 hold" in done.stdout and "Traceback" not in done.stderr
    found = read(tmp_path / "out.json")
    assert found is not None and found.key and found.seconds < 60 and found.versions["transformers"]


@pytest.mark.long
def test_the_command_refuses_by_name(tmp_path: Path) -> None:
    tiny_config("stablelm").save_pretrained(tmp_path)
    done = certified(str(tmp_path))
    if done.returncode:  # a later release may train it
        assert done.returncode == 2 and "stablelm is refused: " in done.stdout and "Traceback" not in done.stderr
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    done = certified(str(tmp_path))
    assert done.returncode == 2 and "model.path" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["qwen3", "cohere2", "mistral3", "olmoe"])
def test_a_server_computes_what_the_learner_does(kind: str, tmp_path: Path) -> None:
    """Also with windows that vLLM counts otherwise, with a tower that no server builds, and with experts."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    done = certified(str(tmp_path), "--server", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = read(tmp_path / "out.json")
    assert found is not None
    served = [check for check in found.checks if check.what.startswith("server")]
    sampled = [check for check in served if check.what.endswith("sampled")]
    assert (len(served), len(sampled)) == (12, 5)
    assert all(check.verdict == "holds" for check in served if check not in sampled)
    assert {check.verdict for check in sampled} <= {"holds", "not compared"}  # a copy may be certain of all tokens


@pytest.mark.parametrize(
    ("kind", "sizes", "verdict", "why"),
    [
        ("llama", {}, "FAULT", "vLLM does not start with it: Engine core initialization failed"),
        ("qwen3_5_text", {}, "not compared", "vLLM on a CPU computes gated delta rules in bfloat16 only"),
        ("llama", {"hidden_size": 96, "head_dim": 48}, "not compared", "vLLM on a CPU serves heads of size 32, 64"),
    ],
)
def test_a_server_that_cannot_start_is_a_line_of_the_table(
    kind: str, sizes: dict[str, int], verdict: str, why: str, tmp_path: Path, monkeypatch: Any
) -> None:
    from actors.certify import served  # imports vLLM, which takes seconds

    async def fail(config: Any, seed: int) -> Any:
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr(served.Engine, "start", fail)
    tiny_config(kind, **sizes).save_pretrained(tmp_path)
    found = served.with_server(certificate(HOLDS), ModelConfig(path=str(tmp_path)))
    (check,) = found.checks[1:]
    assert (check.what, check.verdict) == ("server = learner", verdict) and (check.fault or check.note).startswith(why)
