"""Batches of episodes for the learner's tests, of several segments and turns, and an independent loss of them."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from buffer.wire.message import Array
from buffer.wire.sample import Sample
from configs.schema import AlgorithmConfig
from tests.harness.world import VOCABULARY, Entry


def make_episodes(version: int = 3) -> list[Entry]:
    """Groups of 4 samples of 1 to 3 segments of up to 3 turns each; some prompts are shared, by segments of one sample
    too; rewards of turns in every second group. One group is of one segment and one turn only."""
    draw = np.random.default_rng(version)
    entries = []
    for item in range(6):
        prompts = [draw.integers(0, VOCABULARY, n) for n in draw.integers(1, 20, 2)]
        samples = []
        for _ in range(4):
            segments = [_segment(draw, prompts, one=item == 2) for _ in range(1 if item == 2 else draw.integers(1, 4))]
            samples.append(_sample(draw, segments, version, item % 2 == 1))
        rewards = [sample.reward for sample in samples]
        entries += [Entry(item, max(version - 2, 0), rewards, sample.pack()) for sample in samples]
    return entries


FORKS = (range(6), (0, 1, 6, 7), (0, 1, 2, 3, 8, 9), (0, 1, 2, 3, 4, 10, 11))
"""Turns on each path of an episode of 12 turns with three forks."""


def make_forks(version: int = 3) -> list[Entry]:
    """Groups of 3 episodes of 12 turns with three forks, of one prompt. The second begins with the first turn of the
    first, so that both train its tokens; in one group the third is the first once more."""
    draw = np.random.default_rng(version)
    entries = []
    for item in range(2):
        prompt, samples = draw.integers(0, VOCABULARY, 9), list[Sample]()
        first = _turn(draw)
        for number in range(3):
            turns = [first if number < 2 else _turn(draw), *(_turn(draw) for _ in range(11))]
            paths = [([prompt, *(run for turn in path for run in turns[turn])], path) for path in FORKS]
            seen: set[int] = set()
            segments = []
            for runs, path in paths:
                flags = [0] * len(prompt)
                for turn in path:
                    flags += [int(turn not in seen)] * len(turns[turn][0]) + [0] * len(turns[turn][1])
                seen |= {*path}
                segments.append((np.concatenate(runs), flags))
            again = item == 1 and number == 2
            samples.append(samples[0] if again else _sample(draw, segments, version, item == 1))
        rewards = [sample.reward for sample in samples]
        entries += [Entry(item, max(version - 2, 0), rewards, sample.pack()) for sample in samples]
    return entries


def _turn(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """An answer, and what came back."""
    return draw.integers(0, VOCABULARY, draw.integers(1, 5)), draw.integers(0, VOCABULARY, draw.integers(1, 4))


def _segment(draw: np.random.Generator, prompts: Sequence[np.ndarray], one: bool) -> tuple[np.ndarray, list[int]]:
    """Tokens, and which of them were sampled."""
    prompt = prompts[int(draw.integers(2))]
    sampled = [0] * len(prompt)
    for turn in range(1 if one else draw.integers(1, 4)):
        sampled += [0] * (int(draw.integers(1, 5)) if turn else 0) + [1] * int(draw.integers(1, 9))
    sampled += [0] * int(draw.integers(0, 3))
    return np.concatenate([prompt, draw.integers(0, VOCABULARY, len(sampled) - len(prompt))]), sampled


def _sample(
    draw: np.random.Generator, segments: Sequence[tuple[np.ndarray, list[int]]], version: int, by_turn: bool
) -> Sample:
    flags = [sampled for _, sampled in segments]
    sampled = np.concatenate(flags)
    rewards = [float(x) / 2 for x in draw.integers(-1, 3, sum(own for part in flags for own, _ in groupby(part)))]
    return Sample(
        tokens=Array.of(np.concatenate([tokens for tokens, _ in segments]).astype(np.int32)),
        sampled=Array.of(sampled.astype(np.uint8)),
        behaviour_logprobs=Array.of(np.where(sampled, -draw.exponential(2.0, len(sampled)), 0).astype(np.float32)),
        versions=Array.of(np.where(sampled, version - draw.integers(0, 3, len(sampled)), -1).astype(np.int32)),
        reward=sum(rewards),
        finish="length" if len(sampled) > 50 else "stop",
        starts=np.cumsum([0, *map(len, flags[:-1])]).tolist(),
        turn_rewards=rewards if by_turn else [],
    )


def turn_advantages(samples: Sequence[Sample], items: Sequence[int], config: AlgorithmConfig) -> list[np.ndarray]:
    """The advantage of every token of each sample, from the definition: [tokens] float64, 0 where it was given."""
    discount = 1.0 if config.turn_discount is None else config.turn_discount
    returns, runs = [], []
    for sample in samples:
        flags, found = sample.sampled.numpy(), []
        for start, stop in sample.bounds:
            place = start
            for own, run in groupby(flags[start:stop]):
                length = len(list(run))
                found += [(place, place + length)] if own else []
                place += length
        rewards = sample.turn_rewards or [0.0] * (len(found) - 1) + [sample.reward]
        steps = range(len(found))
        returns.append([sum(discount ** (k - t) * rewards[k] for k in steps if k >= t) for t in steps])
        runs.append(found)
    advantages = []
    for number, (sample, item) in enumerate(zip(samples, items, strict=True)):
        leave_out = config.advantage == "leave_one_out"
        others = [i for i, other in enumerate(items) if other == item and not (leave_out and i == number)]
        totals = [sum(samples[i].turn_rewards) or samples[i].reward for i in others]
        baseline = np.mean(totals if config.turn_discount is None else [returns[i][0] for i in others])
        advantage = np.zeros(len(sample.sampled.numpy()))
        for (start, stop), value in zip(runs[number], returns[number], strict=True):
            advantage[start:stop] = (sample.reward if config.turn_discount is None else value) - baseline
        advantages.append(advantage)
    return advantages


def logprobs_by_segment(model: torch.nn.Module, sample: Sample, together: bool = False) -> Tensor:
    """Log-probabilities of a sample's tokens in float64, each segment fed to the model alone: [tokens], 0 for its first
    token. `together`: the wrong way, the whole sample as one text."""
    bounds = [(0, sample.tokens.shape[0])] if together else sample.bounds
    found = []
    for start, stop in bounds:
        ids = torch.tensor(sample.tokens.numpy()[start:stop]).long()
        logits = model(ids[None]).logits[0, :-1].double()
        found += [logits.new_zeros(1), logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)]
    return torch.cat(found)


def naive_loss(
    model: torch.nn.Module, entries: Sequence[Entry], config: AlgorithmConfig, together: bool = False
) -> Tensor:
    """The loss of a batch, sample by sample, from the formulas of docs/algorithms.md."""
    samples, items = [Sample.unpack(entry.sample) for entry in entries], [entry.item for entry in entries]
    flags = [torch.tensor(sample.sampled.numpy()) == 1 for sample in samples]
    tokens = [int(flag.sum()) for flag in flags]
    loss = torch.zeros((), dtype=torch.float64)
    for number, advantages in enumerate(turn_advantages(samples, items, config)):
        chosen, sample = flags[number], samples[number]
        logp = logprobs_by_segment(model, sample, together)[chosen]
        log_ratio = logp.detach() - torch.tensor(sample.behaviour_logprobs.numpy()).double()[chosen]
        advantage, rho = torch.tensor(advantages)[chosen], log_ratio.exp()
        if config.loss == "gspo":
            ratio = (log_ratio.mean() + logp - logp.detach()).exp()
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            each = torch.maximum(-advantage * ratio, -advantage * clipped)
        elif config.loss == "topr":
            each = -torch.where(advantage > 0, 1, log_ratio.sum().exp().clamp(max=1)) * advantage * logp
        elif config.loss == "cispo":
            each = -rho.clamp(max=config.is_cap) * advantage * logp
        else:
            assert config.loss == "reinforce"
            each = -advantage * logp
        if config.opsm_delta is not None:
            each = torch.where((advantage < 0) & (-log_ratio.mean() > config.opsm_delta), 0, each)
        of_group = sum(n for n, item in zip(tokens, items, strict=True) if item == items[number])
        divisors = {
            "token": sum(tokens),
            "sequence": len(samples) * tokens[number],
            "prompt": len(set(items)) * of_group,
            "constant": len(samples) * (config.constant_length or 30),
        }
        loss = loss + each.sum() / divisors["sequence" if config.loss == "gspo" else config.aggregation]
    return loss
