"""The parts of `benchmarks.experts` that need no vLLM: the mismatch of given samples, and its rows."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.experts import __main__ as experts
from benchmarks.experts.expert_ends import choices, mismatch_of
from benchmarks.learner.cases import SHAPES
from benchmarks.weights.shapes import folder_of
from buffer.wire.message import Array
from buffer.wire.sample import Sample
from configs.schema import LearnerConfig, ModelConfig
from learner.model.flops import active_parameters
from learner.model.loading import build_on_meta
from learner.model.microbatch import one_document
from learner.model.policy import Policy
from tests.harness.expert_batches import random_routes
from tests.harness.world import alone, make_sample

SHAPE = "tiny-experts"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """The mismatch of samples that the learner's own policy sampled, with its own routes, with random ones, without."""
    draw = np.random.default_rng(0)
    samples = [make_sample(draw, 6, length, 0, 1.0) for length in (9, 1, 30)]
    folder = folder_of(SHAPE, tmp_path_factory.mktemp("model"))
    with alone() as mesh:
        policy = Policy(ModelConfig(path=str(folder), dtype="float32"), LearnerConfig(device="cpu"), mesh, random=True,
                        replay=True)  # fmt: skip
        own = [sampled_by(policy, sample) for sample in samples]
        kinds = {
            "own": own,
            "random": [with_routes(one, random_routes(one.tokens.numpy())) for one in own],
            "none": [one.model_copy(update={"routes": None}) for one in own],
        }
        return {name: mismatch_of(policy, these) for name, these in kinds.items()}


def sampled_by(policy: Policy, sample: Sample) -> Sample:
    """`sample` with the log-probabilities and the routes that `policy` gives it."""
    tokens = sample.tokens.numpy()
    with choices(policy) as taken:
        logprobs = np.array([0.0, *policy.logprobs_of(one_document(tokens.tolist()))], np.float32)
    behaviour = Array.of(np.where(sample.sampled.numpy() != 0, logprobs, 0).astype(np.float32))
    routes = torch.stack(taken, 1).numpy().astype(np.uint8)
    return with_routes(sample.model_copy(update={"behaviour_logprobs": behaviour}), routes)


def with_routes(sample: Sample, routes: np.ndarray) -> Sample:
    return Sample.unpack(sample.model_copy(update={"routes": Array.of(routes)}).pack())


def test_a_policy_agrees_with_itself(found: dict[str, dict[str, float]]) -> None:
    own = found["own"]
    assert own["choices"] == own["layers"] == own["tokens"] == 0.0
    assert own["live/dlogp"] < 1e-5 and own["replayed/dlogp"] < 1e-5 and abs(own["replayed/k3"]) < 1e-5


def test_other_routes_are_counted_and_move_what_is_replayed_alone(found: dict[str, dict[str, float]]) -> None:
    """Two random experts of 8 share 1/4 with two others; a pair is the same one time in 28."""
    other = found["random"]
    assert other["live/dlogp"] < 1e-5 and other["replayed/dlogp"] > 0.05 and other["replayed/k3"] > 1e-3
    assert 0.6 < other["choices"] < 0.9 < other["layers"] <= other["tokens"]


def test_samples_without_routes_have_the_live_mismatch_alone(found: dict[str, dict[str, float]]) -> None:
    assert set(found["none"]) == {"live/dlogp", "live/k3"}


def raw(mismatch: dict[str, float], no_routes: str) -> dict:
    """What the ends said of two versions."""
    updates = [{"version": v, "started": 10.0 * v, "weights/probe": 0.02, "stale": 1.5 * v} for v in range(3)]
    events = [{"version": v, "load_s": 3.0 - v, "swapped": 10.0 * v + 0.5} for v in range(3)]
    return {"bytes": 2e9, "updates": updates, "events": events, "no_routes": no_routes} | mismatch


def test_rows_tell_first_loads_from_later_ones_and_probes_from_weights_that_stayed(
    found: dict[str, dict[str, float]],
) -> None:
    rows = {row.what: row for row in experts.server_rows(raw(found["random"], ""), "x")}
    assert rows["the call that loads, first version"].value == 3.0
    assert rows["the call that loads, later ones, worst"].value == 2.0
    assert rows["published to swapped, median"].value == 0.5
    assert (rows["probe of version 2"].value, rows["probe of version 2"].against_value) == (0.02, 3.0)
    mismatch = rows["server to learner, mean difference of log-probabilities"]
    assert (mismatch.value, mismatch.against_value) == (
        found["random"]["live/dlogp"],
        found["random"]["replayed/dlogp"],
    )
    assert rows["tokens whose route is not the learner's"].value == 100 * found["random"]["tokens"]


def test_a_vllm_without_routes_is_named(found: dict[str, dict[str, float]]) -> None:
    rows = {row.what: row for row in experts.server_rows(raw(found["none"], "it has no second runner"), "x")}
    assert rows["routes: NONE RETURNED"].against.endswith(": it has no second runner")
    assert "vllm" in rows["routes: NONE RETURNED"].against
    mismatch = rows["server to learner, mean difference of log-probabilities"]
    assert "NOT MEASURED" in mismatch.against and mismatch.against_value is None


def test_a_way_to_learn_without_an_answer_is_named_beside_the_others() -> None:
    rows = list(experts.learner_rows({"answers": {}, "missing": ["ours-compiled"], "tflops": 0.0}, "x"))
    assert [row.what for row in rows] == [f"{experts.FAILED}: learner, ours-compiled"]


def test_the_middle_shape_is_eight_layers_of_30b_a3b(tmp_path: Path) -> None:
    folder = folder_of("Qwen3-30B-A3B-8", tmp_path)
    model = build_on_meta(ModelConfig(path=str(folder)), "sdpa")
    head = 2 * 151_936 * 2048 + 2048
    assert 6 * (model.num_parameters() - head) + head == 30_532_122_624
    assert 6 * (active_parameters(model) - head) + head == pytest.approx(3.35e9, rel=2e-3)
    assert json.loads((folder / "config.json").read_text()).items() >= SHAPES["Qwen3-30B-A3B-8"].items()
