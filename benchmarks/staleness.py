"""Which loss bears which staleness: reward against versions for every loss at fixed ages, with naive PPO as control.

`python -m benchmarks.staleness` runs on CPU by itself (no buffer, no servers) and waits for nothing but its own worker
processes. A small transformer learns to reverse a row of digits; batch v is sampled by the learner's own weights of
version max(0, v - age), as a server would that lags by exactly `age`. Losses and advantages are the learner's own, with
their defaults; optimizer, learning rate, batches and seeds are the same for all. Prints one table; writes
`benchmarks/results/staleness.json` and `staleness.png`.
"""

import argparse
import json
import platform
import sys
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from learner.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig, LossInputs

RESULTS = Path(__file__).parent / "results"
AGES = (0, 1, 4, 16, 64)
CONTROL = "ppo"
LABELS = {CONTROL: "ppo (naive)"}
OVERRIDES: dict[str, dict[str, Any]] = {"gspo": {"clip_low": 3e-4, "clip_high": 4e-4}}
"""What docs/algorithms.md calls usual where the schema's default is meant for another loss."""
SYMBOLS = 10


@dataclass(frozen=True)
class Settings:
    """Everything that all runs share."""

    versions: int = 300
    groups: int = 8
    samples: int = 8
    length: int = 8
    width: int = 32
    layers: int = 2
    lr: float = 2e-3
    warm_reward: float = 0.4
    exam_every: int = 20
    exam_problems: int = 256


class Run(NamedTuple):
    """One curve: `rewards` are of the policy at `versions`, on fresh problems, sampled as in training."""

    loss: str
    age: int
    seed: int
    versions: list[int]
    rewards: list[float]
    seconds: float


class Model(nn.Module):
    """A causal transformer over digits, a separator, and learned positions."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS + 1, settings.width)
        self.position = nn.Parameter(torch.randn(2 * settings.length + 1, settings.width) * 0.1)
        self.blocks = nn.ModuleList(Block(settings.width) for _ in range(settings.layers))
        self.head = nn.Linear(settings.width, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, tokens] int64 -> log-probabilities of the next digit, [samples, tokens, SYMBOLS]."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits.log_softmax(-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = self.mlp(self.norms[1](x))
        return x + y


def problems(count: int, settings: Settings, random: torch.Generator) -> Tensor:
    """[count, length + 1]: digits and the separator."""
    digits = torch.randint(SYMBOLS, (count, settings.length), generator=random)
    return torch.cat([digits, torch.full((count, 1), SYMBOLS)], dim=1)


@torch.no_grad()
def sample(model: Model, prompts: Tensor, settings: Settings, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [samples, 2 length + 1], behaviour log-probabilities, rewards: the share of digits in the right place."""
    tokens, chosen = prompts, []
    for _ in range(settings.length):
        logprobs = model(tokens)[:, -1]
        digit = torch.multinomial(logprobs.exp(), 1, generator=random)
        chosen.append(logprobs.gather(1, digit))
        tokens = torch.cat([tokens, digit], dim=1)
    right = tokens[:, settings.length + 1 :] == prompts[:, : settings.length].flip(1)
    return tokens, torch.cat(chosen, dim=1), right.float().mean(1)


def examine(model: Model, settings: Settings, random: torch.Generator) -> float:
    """Mean reward on fresh problems."""
    return float(sample(model, problems(settings.exam_problems, settings, random), settings, random)[2].mean())


def answer_logprobs(model: Model, tokens: Tensor, settings: Settings) -> Tensor:
    """Log-probabilities of the answer's digits, [samples, length]."""
    answer = tokens[:, settings.length + 1 :]
    logprobs: Tensor = model(tokens[:, :-1])[:, settings.length :]
    return logprobs.gather(2, answer[..., None]).squeeze(2)


@cache
def warm_start(seed: int, settings: Settings) -> dict[str, Tensor]:
    """Weights of a model shown right answers until it earns `warm_reward`: good enough to be rewarded, not yet done."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    model, reward = Model(settings), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    while reward < settings.warm_reward:
        for _ in range(4):
            prompts = problems(128, settings, random)
            tokens = torch.cat([prompts, prompts[:, : settings.length].flip(1)], dim=1)
            optimizer.zero_grad()
            torch.autograd.backward(-answer_logprobs(model, tokens, settings).mean())
            optimizer.step()
        reward = examine(model, settings, random)
    return model.state_dict()


def batch_loss(
    model: Model,
    data: tuple[Tensor, Tensor, Tensor],
    config: AlgorithmConfig,
    sampler: int,
    version: int,
    settings: Settings,
) -> Tensor:
    """Loss of a batch that version `sampler` sampled and `version` is trained on. The batch is one part, so that the
    limit of m2po and the proximal policy of decoupled need no pass of their own."""
    tokens, behaviour, rewards = data
    count = settings.groups * settings.samples
    advantages = ADVANTAGES[config.advantage](rewards, torch.arange(count) // settings.samples)
    logprobs = answer_logprobs(model, tokens, settings).flatten()
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour=behaviour.flatten(),
        advantages=advantages.repeat_interleave(settings.length),
        sampled=torch.ones_like(logprobs, dtype=torch.bool),
        sequence=torch.arange(count).repeat_interleave(settings.length),
        num_sequences=count,
        num_tokens=count * settings.length,
        versions=torch.full(logprobs.shape, sampler),
        version=version,
    )
    return LOSSES[config.loss](inputs, config)[0]


def train(loss: str, age: int, seed: int, settings: Settings) -> Run:
    """One curve. The first `age` batches are sampled by version 0, as in a run that starts with a full queue."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    model, server = Model(settings), Model(settings)
    model.load_state_dict(warm_start(seed, settings))
    random, exam = torch.Generator().manual_seed(seed + 1), torch.Generator().manual_seed(seed + 2)
    config = AlgorithmConfig(loss=loss, **OVERRIDES.get(loss, {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    past: deque[dict[str, Tensor]] = deque(maxlen=age + 1)
    versions, rewards = [], []
    for version in range(settings.versions + 1):
        if version % settings.exam_every == 0:
            versions.append(version)
            rewards.append(examine(model, settings, exam))
        past.append({name: value.clone() for name, value in model.state_dict().items()})
        server.load_state_dict(past[0])
        prompts = problems(settings.groups, settings, random).repeat_interleave(settings.samples, 0)
        data = sample(server, prompts, settings, random)
        value = batch_loss(model, data, config, version - len(past) + 1, version, settings)
        optimizer.zero_grad()
        torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return Run(loss, age, seed, versions, rewards, time.perf_counter() - start)


def final(runs: list[Run], loss: str, age: int) -> float:
    """Mean over seeds of the last fifth of the curves."""
    chosen = [run.rewards for run in runs if (run.loss, run.age) == (loss, age)]
    return mean(mean(rewards[-max(len(rewards) // 5, 1) :]) for rewards in chosen)


def table(runs: list[Run], losses: list[str], ages: list[int]) -> str:
    """Final reward by loss and age."""
    lines = ["final reward".ljust(14) + "".join(f"age {age}".rjust(9) for age in ages)]
    for loss in losses:
        lines.append(LABELS.get(loss, loss).ljust(14) + "".join(f"{final(runs, loss, age):9.3f}" for age in ages))
    return "\n".join(lines)


def record(runs: list[Run], losses: list[str], ages: list[int], settings: Settings, seconds: float) -> dict[str, Any]:
    """What staleness.json holds: one row a loss and age, beside the control at the same age; and all curves."""
    rows = [
        {
            "what": f"{loss}, age {age}: final reward",
            "value": round(final(runs, loss, age), 4),
            "unit": "reward in [0, 1]",
            "against": f"{LABELS[CONTROL]}, age {age}",
            "against_value": round(final(runs, CONTROL, age), 4),
        }
        for loss, age in product(losses, ages)
    ]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{platform.machine()} CPU, one thread a run",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": "python -m benchmarks.staleness " + " ".join(sys.argv[1:]),
        "seconds": round(seconds),
        "settings": asdict(settings),
        "rows": rows,
        "curves": [run._asdict() for run in runs],
    }


def draw(runs: list[Run], losses: list[str], ages: list[int], path: Path) -> None:
    """One panel an age, one line a loss: mean over seeds, and their range as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(ages), figsize=(4 * len(ages), 4), sharey=True, squeeze=False)
    for age, panel in zip(ages, panels[0], strict=True):
        for loss in losses:
            chosen = [run for run in runs if (run.loss, run.age) == (loss, age)]
            curves = list(zip(*(run.rewards for run in chosen), strict=True))
            style = {"color": "black", "linestyle": "--"} if loss == CONTROL else {}
            (line,) = panel.plot(chosen[0].versions, list(map(mean, curves)), label=LABELS.get(loss, loss), **style)
            low, high = list(map(min, curves)), list(map(max, curves))
            panel.fill_between(chosen[0].versions, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        panel.set(title=f"age {age}", xlabel="version", ylim=(0, 1))
    panels[0][0].set_ylabel("reward on fresh problems")
    panels[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Reward against versions for every loss at fixed ages.")
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--ages", nargs="+", type=int, default=list(AGES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--versions", type=int, default=Settings.versions)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    losses = args.losses if CONTROL in args.losses else [*args.losses, CONTROL]
    settings, start, runs = Settings(versions=args.versions), time.perf_counter(), []
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(train, *job, settings) for job in product(losses, args.ages, range(args.seeds))]
        for job in jobs:
            runs.append(run := job.result())
            print(
                f"{run.loss:10} age {run.age:3} seed {run.seed}: {run.rewards[-1]:.3f}  {run.seconds:.0f} s", flush=True
            )
    args.results.mkdir(parents=True, exist_ok=True)
    print(table(runs, losses, args.ages))
    results = record(runs, losses, args.ages, settings, time.perf_counter() - start)
    (args.results / "staleness.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(runs, losses, args.ages, args.results / "staleness.png")


if __name__ == "__main__":
    main()
