"""A user's loss and advantage, by path: the same numbers as a built-in one, or refused in one line before a run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs.load import ConfigError
from configs.schema import AlgorithmConfig
from learner.__main__ import OVER
from learner.algorithms.advantages import group_mean
from learner.algorithms.losses import LOSSES
from learner.algorithms.own import OwnFailure, advantage_of, loss_of
from learner.algorithms.own_trial import batch, check_own
from learner.train.batch import Batch
from tests.harness.world import algorithm_of, cut, gradients, make_samples, policy_of, tiny_model

OWN = """
import os
import torch
import torch.distributed as dist
from learner.algorithms.losses import TokenLosses, dppo

def again(inputs, config):
    return dppo(inputs, config)
def cispo(inputs, config):
    weight = inputs.log_ratio.detach().clamp(-20, 20).exp().clamp(max=config.is_cap)
    return -weight * inputs.advantages * inputs.policy_logprobs
def of_sample(inputs, config):
    return -inputs.mean_log_ratio().clamp(-1, 1).exp() * inputs.advantages * inputs.policy_logprobs
def mean(inputs, config): return cispo(inputs, config).mean()
def detached(inputs, config): return cispo(inputs, config).detach()
def flat(inputs, config): return cispo(inputs, config) * 0
def whitened(inputs, config):
    advantages = inputs.advantages
    return -(advantages - advantages.mean()) / (advantages.std() + 1e-6) * inputs.policy_logprobs
def own_sums(inputs, config):
    return -inputs.sequence_mean(inputs.log_ratio.detach()).exp() * inputs.advantages * inputs.policy_logprobs
def infinite(inputs, config): return -(inputs.log_ratio * 30).exp() * inputs.advantages
def unsampled(inputs, config): return -inputs.behaviour.log() * 0 + cispo(inputs, config)
def root(inputs, config): return -torch.where(inputs.log_ratio > 0, inputs.log_ratio.sqrt(), 0) * inputs.advantages
def raises(inputs, config): return config.no_such_key
def number(inputs, config): return 1.0
def in_place(inputs, config):
    inputs.policy_logprobs.clamp_(min=-20)
    inputs.advantages.clamp_(-0.1, 0.1)
    inputs.sampled.zero_()
    return cispo(inputs, config)
def of_sampled(inputs, config):
    return cispo(inputs, config).clamp(max=inputs.behaviour[inputs.sampled].max().abs() + 1e6)
def reduces(inputs, config):
    total = inputs.advantages.sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return cispo(inputs, config)

def centred(rewards, groups, lengths=None):
    return torch.stack([r - rewards[groups == g].mean() for r, g in zip(rewards, groups)])
def reshaped(rewards, groups, lengths=None): return (rewards.view(-1, 3) - rewards.view(-1, 3).mean(1, True)).flatten()
def zero(rewards, groups, lengths=None): return rewards * 0
def nan(rewards, groups, lengths=None): return rewards / 0 * 0
def per_group(rewards, groups, lengths=None): return rewards[:3]
def float32(rewards, groups, lengths=None):
    made = torch.zeros(len(rewards))
    made[:] = centred(rewards, groups)
    made[groups == groups[0]] = rewards[groups == groups[0]]
    return made
def spreads(rewards, groups, lengths=None):
    every = [rewards[groups == g] for g in groups]
    return torch.stack([(r - of.mean()) / of.std() for r, of in zip(rewards, every)])
def whole(rewards, groups, lengths=None): return (rewards * 4).long()
def of_batch(rewards, groups, lengths=None): return (rewards - rewards.mean()) / rewards.std()
def changes_in_place(rewards, groups, lengths=None):
    rewards *= 2
    return rewards
def moves(rewards, groups, lengths=None):
    os.chdir("/")
    return centred(rewards, groups)
def fails(rewards, groups, lengths=None):
    if len(rewards) == 9:
        return centred(rewards, groups)
    raise KeyError(
        "eleven")
def gathers(rewards, groups, lengths=None):
    if dist.is_initialized():
        dist.all_gather_object([None] * dist.get_world_size(), 1)
    return centred(rewards, groups)
"""
WIDE = """
import torch
torch.set_default_dtype(torch.float64)
def loss(inputs, config): return -inputs.advantages * inputs.policy_logprobs
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def here() -> Iterator[None]:
    """Restore what a user's file changes in this process."""
    folder, dtype = Path.cwd(), torch.get_default_dtype()
    yield
    os.chdir(folder)
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize(("own", "built_in"), [("again", "dppo"), ("cispo", "cispo")])
def test_a_loss_of_the_users_has_the_gradient_of_the_same_built_in_one(
    own: str, built_in: str, file: Path, tmp_path: Path, mesh
) -> None:
    entries, found = make_samples(), []
    for loss in (built_in, f"{file}:{own}"):
        policy = policy_of(tiny_model(tmp_path), mesh)
        part = cut(entries, 3, [len(entries)], 0)
        config = AlgorithmConfig(loss=loss, advantage=f"{file}:centred" if own == "cispo" else "group_mean")
        algorithm_of(policy, 64, config).backward(policy, Batch.from_part(part, 64, policy.costs.quadratic))
        found.append(gradients(policy))
    assert found[0] and all(torch.allclose(found[0][name], found[1][name], rtol=1e-4, atol=1e-6) for name in found[0])


def test_a_users_loss_may_say_which_tokens_it_masks(file: Path) -> None:
    config = AlgorithmConfig(loss=f"{file}:again", tv_high=0.01, tv_low=0.01)
    found, known = loss_of(config)(batch(config), config), LOSSES["dppo"](batch(config), config)
    assert found[0] == known[0] and found[1] == known[1] and found[1]["positive/masked"] > 0


@pytest.mark.parametrize("loss", ["again", "cispo", "of_sample"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
def test_a_sound_loss_is_accepted_with_any_aggregation(loss: str, aggregation: str, file: Path) -> None:
    config = AlgorithmConfig(loss=f"{file}:{loss}", aggregation=aggregation, entropy_bonus=0.1, reference_kl=0.1)
    (line,) = check_own(config, 30, has_segments=True)
    assert line == f"algorithm.loss: {file}:{loss} was tried on a batch of 9 samples; its parts add up"


@pytest.mark.parametrize("name", LOSSES)
def test_every_built_in_loss_would_be_accepted_but_m2po(name: str, tmp_path: Path) -> None:
    """`m2po` has a budget of the whole batch, which Headrace gathers from all microbatches for it alone."""
    (tmp_path / f"as_{name}.py").write_text(f"from learner.algorithms.losses import {name} as loss\n")
    config = AlgorithmConfig(loss=f"{tmp_path}/as_{name}.py:loss")
    if name == "m2po":
        with pytest.raises(ConfigError, match="or another gradient, and the whole batch"):
            list(check_own(config.model_copy(update={"m2_budget": 0.001}), 30, True))
    else:
        assert len(list(check_own(config, 30, True))) == 1


def test_built_in_ones_are_not_tried() -> None:
    assert list(check_own(AlgorithmConfig(), 30, True)) == []


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("mean", "returns a tensor of shape [] where [36] is needed; return the loss of each token, [tokens]"),
        ("number", "returns an object of float where [36] is needed"),
        (
            "detached",
            "has no gradient for inputs.policy_logprobs; compute it from them, without detach() and",
        ),
        ("flat", "has no gradient for inputs.policy_logprobs"),
        ("whitened", ": a batch cut into two microbatches has the loss"),
        ("own_sums", ": a batch cut into two microbatches with a segment of each sample in both has the loss"),
        ("infinite", " where learner and servers differ much; clamp log-ratios before exp"),
        ("unsampled", "gives nan; mind that a token that was not sampled has 0 in all inputs"),
        ("root", "has a gradient that is not finite; mind that"),
        (
            "raises",
            "raised AttributeError: 'AlgorithmConfig' object has no attribute 'no_such_key' in line 25; correct",
        ),
        ("of_sampled", "raised RuntimeError: max(): Expected reduction dim to be specified for input.numel() == 0."),
        ("missing", "mine.py has no function 'missing'"),
    ],
)
def test_an_unsound_loss_is_refused_in_one_line(loss: str, words: str, file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        list(check_own(AlgorithmConfig(loss=f"{file}:{loss}"), 30, has_segments=True))
    (line,) = error.value.problems
    assert line.startswith("algorithm.loss: ") and words in line and "\n" not in line


def test_sums_over_a_sample_are_right_where_samples_have_one_segment(file: Path) -> None:
    assert len(list(check_own(AlgorithmConfig(loss=f"{file}:own_sums"), 30, has_segments=False))) == 1


@pytest.mark.parametrize(
    ("advantage", "words"),
    [
        ("reshaped", "gives a sample another value in another order of samples; find its group by `groups`"),
        ("zero", "gives 0 for each of 9 samples with rewards from -1 to 2"),
        ("nan", "gives nan for a sample of a group with rewards from 0 to 1; correct it"),
        ("spreads", "gives nan for a sample of a group whose rewards are all 2; divide by no spread without"),
        ("of_batch", "gives nan for a sample of a group whose rewards are all 0; divide by no spread without"),
        ("float32", "raised RuntimeError: Index put requires the source and destination dtypes match"),
        ("whole", "gives values of type torch.int64; return floating point numbers"),
        ("moves", "mine.py changes the current folder from "),
        ("per_group", "returns a tensor of shape [3] where [9] is needed; return a number for each sample, [samples]"),
    ],
)
def test_an_unsound_advantage_is_refused_in_one_line(advantage: str, words: str, file: Path, here: None) -> None:
    with pytest.raises(ConfigError) as error:
        list(check_own(AlgorithmConfig(advantage=f"{file}:{advantage}"), 30, has_segments=False))
    (line,) = error.value.problems
    assert line.startswith("algorithm.advantage: ") and words in line


def test_a_file_that_changes_the_process_is_refused(tmp_path: Path, here: None) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    with pytest.raises(ConfigError) as error:
        list(check_own(AlgorithmConfig(loss=f"{tmp_path}/wide.py:loss"), 30, has_segments=True))
    (line,) = error.value.problems
    assert line.startswith(f"algorithm.loss: {tmp_path}/wide.py changes torch's default dtype from torch.float32 to ")


@pytest.mark.parametrize(("key", "name"), [("loss", "reduces"), ("advantage", "gathers")])
def test_what_waits_for_other_ranks_is_refused(key: str, name: str, file: Path) -> None:
    """Ranks have different numbers of microbatches: one of them would wait for ever."""
    config = AlgorithmConfig(**{key: f"{file}:{name}"})
    assert len(list(check_own(config, 30, has_segments=False))) == 1
    result = in_own_process(f"check_alone(AlgorithmConfig({key}={f'{file}:{name}'!r}))")
    assert f"algorithm.{key}: {file}:{name} raised RuntimeError: c10d::all" in result.stderr
    assert " waits for other ranks, whose microbatches differ in number; leave it out in line " in result.stderr


def test_what_waits_for_no_rank_passes_in_a_process_of_its_own(file: Path) -> None:
    assert in_own_process(f"check_alone(AlgorithmConfig(loss={f'{file}:cispo'!r}))").returncode == 0


def in_own_process(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of Python in a process that has no process group."""
    imports = "from configs.schema import AlgorithmConfig; from learner.algorithms.own_trial import check_alone"
    return subprocess.run([sys.executable, "-c", f"{imports}; {line}"], capture_output=True, text=True, timeout=300)


def test_changes_in_place_reach_nothing_else(file: Path) -> None:
    config, values = AlgorithmConfig(loss=f"{file}:in_place", advantage=f"{file}:changes_in_place"), []
    for loss in (config.loss, f"{file}:cispo"):
        chosen = config.model_copy(update={"loss": loss})
        given = batch(chosen)
        values.append(loss_of(chosen)(given, chosen)[1])
        assert given.sampled.any() and given.advantages.abs().max() > 1
    assert values[0].keys() == values[1].keys()
    assert all(values[0][name] == values[1][name] for name in values[0] if name != "loss/policy")
    rewards = torch.ones(3)
    advantage_of(config)(rewards, torch.zeros(3), torch.ones(3))
    assert rewards.tolist() == [1, 1, 1]


def test_what_it_raises_during_a_run_ends_the_learner_in_one_line(file: Path) -> None:
    advantage = advantage_of(AlgorithmConfig(advantage=f"{file}:fails"))
    with pytest.raises(OwnFailure, match=r"mine.py:fails raised KeyError: 'eleven' in line \d+; correct it$"):
        advantage(torch.zeros(4), torch.zeros(4), torch.ones(4))
    assert issubclass(OwnFailure, OVER)


def test_an_advantage_of_the_users_gets_all_samples_of_the_batch(file: Path) -> None:
    config = AlgorithmConfig(advantage=f"{file}:centred")
    (line,) = check_own(config, 30, has_segments=False)
    assert line.endswith("was tried on a batch of 9 samples")
    given = torch.tensor([1.0, 0.0, 0.5, 0.25]), torch.tensor([4, 1, 4, 1]), torch.tensor([1, 2, 3, 4])
    assert torch.allclose(advantage_of(config)(*given), group_mean(*given))


def test_a_result_of_another_shape_is_refused_at_every_call(file: Path) -> None:
    config = AlgorithmConfig(loss=f"{file}:mean")
    with pytest.raises(ValueError, match=r"algorithm.loss: .*mine.py:mean returns a tensor of shape"):
        loss_of(config)(batch(config), config)
