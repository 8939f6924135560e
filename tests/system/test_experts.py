"""A whole run of a mixture of experts: the real processes with the real vLLM, every policy probed in float32."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.countdown.make_model import make_tokenizer
from tests.harness.tiny_experts import tiny_experts
from tests.harness.toy import Toy, python

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]
VERSIONS = 20
STALENESS = 4
"""The quickstart's bound on age. A slow machine may be as late with the last policy, since only the newest is sent."""


def make_model(folder: Path) -> Path:
    """A random Qwen3-MoE that reads and writes characters."""
    tokenizer = make_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    tokenizer.save_pretrained(tiny_experts(folder, vocab_size=len(tokenizer), **ends))
    return folder


def test_a_mixture_of_experts_trains_and_every_server_computes_what_the_learner_does(tmp_path: Path) -> None:
    """Short answers pay. Were the experts of an earlier policy left in a server's kernels, probes would differ."""
    toy, model = Toy(tmp_path), make_model(tmp_path / "model")
    made = python("examples.countdown.make_problems", "--out", tmp_path / "data", "--eval", "12")
    assert made.returncode == 0, made.stderr
    run = toy.run("experts")
    settings = toy.settings("experts", f"--run.versions={VERSIONS}", "--learner.lr=5e-3")
    reward = ["--reward.function=length", "--reward.kwargs={free: 0, cap: 19}", "--sampling.stop=[]"]
    launched = python("actors", "launch", *settings, *reward, "--weights.probe_tolerance=1e-4", timeout_s=800.0)
    assert launched.returncode == 0, launched.stdout[-4000:] + launched.stderr[-2000:]
    records = run.metrics()
    assert [record["version"] for record in records] == list(range(1, VERSIONS + 1))
    probes = [record["weights/probe"] for record in records if "weights/version" in record]
    assert len(probes) >= VERSIONS // 2 and 0 < max(probes) < 1e-4
    assert records[-1]["weights/version"] >= VERSIONS - 1 - STALENESS and records[-1]["weights/failed"] == 0
    trained = load_file(run.path / "checkpoints" / f"v{VERSIONS:06d}" / "huggingface" / "model.safetensors")
    before = load_file(model / "model.safetensors")
    moved = [float((trained[name] - before[name]).abs().mean()) for name in before if ".experts." in name]
    assert len(moved) == 2 * 8 * 3 and min(moved) > 1e-3
