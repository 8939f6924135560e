"""What a worker of a server needs beside vLLM for the next version: by hand, by the plan that is sent, and in the lines
of `explain`."""

import json
from pathlib import Path

import pytest

from configs.explain import explain
from configs.publishing import GROUP_BYTES
from configs.schema import Config
from configs.staging import contradictions, room
from learner.weights.plan import Plan, Spec, dtype_of
from learner.weights.rows import bucket_bytes, scratch_bytes
from learner.weights.slices import Region, arrival_bytes, staged_bytes
from tests.configs.test_explain import config

LAYERS, SHAPE = 30, (1000, 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """30 matrices of 2 MB in bfloat16."""
    tensors = {f"w{i}": {"dtype": "BF16", "shape": SHAPE, "data_offsets": [0, 0]} for i in range(LAYERS)}
    header = json.dumps(tensors)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return tmp_path


def sent(run: Config, ranks: int) -> Plan:
    """The plan of the weights in `folder`."""
    specs = [Spec(f"w{i}", SHAPE, dtype_of("bfloat16")) for i in range(LAYERS)]
    return Plan.of(specs, bucket_bytes(run.weights, ranks), ranks=ranks)


@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_the_estimate_is_that_of_the_plan(folder: Path, ranks: int, parallel: int) -> None:
    """Within the two matrices by which a bucket may be smaller than `bucket_mib`."""
    keys = (f"learner.ranks={ranks}", f"rollout.tensor_parallel={parallel}", "weights.bucket_mib=5")
    run = config(f"model.path={folder}", *keys, *(["weights.publish=rows"] if ranks > 1 else []))
    plan, needs = sent(run, ranks), room(run)
    assert needs
    scratch, groups = scratch_bytes(plan), (ranks - 1) * GROUP_BYTES
    halves = [Region(slot.spec.name, 0, (SHAPE[0] // parallel, SHAPE[1]), (SHAPE[1], 1)) for slot in plan.slots]
    exact = (
        plan.total_bytes + 2 * scratch + groups,
        staged_bytes(plan, halves) + arrival_bytes(plan, scratch) + groups,
        min(2, len(plan.sizes)) * max(plan.sizes) + 2 * scratch + groups,
    )
    for estimate, real in zip(needs, exact, strict=True):
        assert abs(estimate - real) < 2 * 2 * 10**6 + 10**6


def test_explain_says_what_a_worker_needs(folder: Path) -> None:
    def line(*keys: str) -> str:
        run = config(f"model.path={folder}", "weights.bucket_mib=5", *keys)
        return "".join(line for line in explain(run) if line.startswith("staging:"))

    paused = "; 0.0105 GB are enough for weights.staging: bucket, which pauses"
    whole, takes = "about 0.06 GB beside vLLM for the next version", "staging: each worker of a server takes "
    sliced = "about 0.06 GB, or 0.0405 GB if it can stage what it loads only, beside vLLM for the next version"
    assert line() == takes + whole + paused
    assert line("rollout.tensor_parallel=2") == takes + sliced + paused
    assert line("rollout.tensor_parallel=2", "weights.staging=full") == takes + whole
    assert "about 0.0405 GB beside" in line("rollout.tensor_parallel=2", "weights.staging=slices")
    assert not line("rollout.device=cpu")


def test_clones_count_for_a_model_whose_loader_keeps_all_weights(folder: Path) -> None:
    def needed(kind: str, *keys: str) -> tuple[int, str]:
        (folder / "config.json").write_text(json.dumps({"model_type": kind, "num_local_experts": 8}))
        run = config(f"model.path={folder}", "weights.bucket_mib=5", *keys)
        needs = room(run)
        assert needs
        return needs.bucket, "".join(line for line in explain(run) if line.startswith("staging:"))

    (mixtral, enough), (granite, too_much) = needed("mixtral"), needed("granitemoe")
    assert granite - mixtral == LAYERS * 2 * SHAPE[0] * SHAPE[1]
    assert "are enough for weights.staging: bucket" in enough and "bucket" not in too_much
    assert "takes about 0.0705 GB" in needed("granitemoe", "weights.staging=bucket")[1]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (("model.lora={rank: 8}",), "model.lora is set, and an adapter is loaded from whole tensors"),
        (("rollout.device=cpu",), "rollout.device is cpu, where vLLM rebuilds layers from whole tensors"),
        (("rollout.engine.quantization=fp8",), "rollout.engine.quantization is fp8, which is computed from whole"),
        ((), ""),
    ],
)
def test_slices_are_refused_where_vllm_needs_whole_tensors(folder: Path, keys: tuple[str, ...], why: str) -> None:
    for staging in ("auto", "full", "bucket"):
        assert not list(contradictions(config(f"model.path={folder}", *keys, f"weights.staging={staging}")))
    lines = list(contradictions(config(f"model.path={folder}", *keys, "weights.staging=slices")))
    assert len(lines) == bool(why) and all(line.startswith(f"weights.staging: slices, but {why}") for line in lines)
    assert all(line.endswith("; set auto") for line in lines)


@pytest.mark.parametrize(("kind", "sliceable"), [("qwen3_moe", True), ("deepseek_v3", False), ("afmoe", False)])
def test_slices_of_experts_are_for_models_that_load_in_place(folder: Path, kind: str, sliceable: bool) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "num_experts": 8}))
    lines = list(contradictions(config(f"model.path={folder}", "weights.staging=slices")))
    refused = "weights.staging: slices, but the model has experts, which vLLM rebuilds from whole tensors; set auto"
    assert lines == ([] if sliceable else [refused])
