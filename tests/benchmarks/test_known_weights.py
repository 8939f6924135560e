"""The weights of `benchmarks/weights/known.py` give the distributions that the benchmarks rely on, in bfloat16."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.async_vs_sync import tail_ratio
from benchmarks.weights import known
from benchmarks.weights.known import VERSIONS, end_answers, logprobs_of, mark, show
from benchmarks.weights.shapes import END, folder_of
from benchmarks.weights.traffic import SAME

VOCABULARY = 512


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> torch.nn.Module:
    """A random model of the smallest shape."""
    config = AutoConfig.from_pretrained(folder_of("speck", tmp_path), tie_word_embeddings=request.param)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@torch.no_grad()
def logprobs(model: torch.nn.Module, below: int = VOCABULARY) -> torch.Tensor:
    """Log-probabilities of each next token after each of 64 random ones `below` an id: [64, vocabulary]."""
    tokens = torch.randint(3, below, (1, 64), generator=torch.Generator().manual_seed(1))
    hidden = model.get_decoder()(tokens).last_hidden_state[0].float()  # type: ignore[operator]
    return (hidden @ model.get_output_embeddings().weight.float().T).log_softmax(-1)  # type: ignore[operator]


def test_every_log_probability_tells_its_version(model: torch.nn.Module) -> None:
    last = mark(model.named_parameters())
    for version in (1, 2, 17, VERSIONS - 1, VERSIONS, VERSIONS + 5):
        show(last, version, rank=0)
        found, known = logprobs(model), logprobs_of(version, VOCABULARY)
        error = torch.stack([(found - value).abs() for value in known]).amin(0)
        assert error.max() < 1e-5  # of a token after itself too


def test_versions_differ_by_more_than_the_check_allows() -> None:
    values = sorted(value for version in range(VERSIONS) for value in logprobs_of(version, 152064))
    assert min(b - a for a, b in pairwise(values)) > 4 * SAME


@pytest.mark.parametrize(("mean", "share"), [(20.0, 0.05), (0.0, 0.0)])
def test_an_answer_ends_with_one_probability_after_every_token(
    model: torch.nn.Module, mean: float, share: float
) -> None:
    end_answers(model.named_parameters(), END, VOCABULARY, mean)
    assert logprobs(model)[:, END].exp().tolist() == pytest.approx([share] * 64, rel=0.03, abs=1e-6)


@pytest.mark.parametrize(("mean", "share"), [(20.0, 0.05), (0.0, 0.0)])
def test_as_many_different_tokens_are_sampled_as_in_texts(
    model: torch.nn.Module, mean: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "TEXT_TOKENS", 100)
    end_answers(model.named_parameters(), END, VOCABULARY, mean)
    found = logprobs(model, 100).exp()
    assert found[:, END].tolist() == pytest.approx([share] * 64, rel=0.03, abs=1e-6)
    assert found[:, 100:].max() < 1e-12
    assert logprobs(model).min() > -100, "the probe takes any tokens, and rounding shows in large numbers"
    others = [token for token in range(100) if token != END]
    assert found[:, others].min() == pytest.approx((1 - share) / 99, rel=0.03)


def test_the_longest_of_a_group_against_the_mean() -> None:
    lengths = torch.ceil(torch.empty(4000, 16).exponential_(1 / 50.0, generator=torch.Generator().manual_seed(0)))
    lengths = lengths.clamp(1, 200)
    measured = float(lengths.amax(1).mean() / lengths.mean())
    assert tail_ratio(50.0, 200, 16) == pytest.approx(measured, rel=0.03)
