"""How much staleness each loss tolerates: reward against versions for every loss at fixed ages, with naive PPO as
control.

`python -m benchmarks.staleness` runs on CPU by itself (no buffer, no servers) and waits for nothing but its own worker
processes, of one thread each. A small transformer learns to reverse a sequence of digits; batch v is sampled by the
learner's own weights of version max(0, v - age), like a server that lags by exactly `age`. Losses and advantages are
the learner's own, with their defaults; optimizer, batches and seeds are the same for all. Prints one table; writes
`benchmarks/results/staleness.json` and `staleness.png`.

Every loss runs at every learning rate of RATES. Table and plot show, for each loss, the rate whose final reward (last
fifth of the curve, mean over seeds) has the highest mean over ages 0 to 4: chosen once per loss, not once per age,
because a run must choose its rate before it knows its age. The JSON holds all rates, seed by seed; a seed determines
the weights that all losses start from. At age 0 all losses have the same gradient and differ by accumulated rounding
errors only: differences of that size mean nothing at other ages either.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.schema import AlgorithmConfig
from learner.algorithms.advantages import ADVANTAGES
from learner.algorithms.inputs import LossInputs
from learner.algorithms.losses import LOSSES

RESULTS = Path(__file__).parent / "results"
AGES = (0, 1, 4, 16, 64)
CONTROL = "ppo"
LABELS = {CONTROL: "ppo (naive)"}
CASES = {name: AlgorithmConfig(loss=name) for name in LOSSES} | {
    "gspo": AlgorithmConfig(loss="gspo", clip_low=3e-4, clip_high=4e-4),
    "gspo wide": AlgorithmConfig(loss="gspo"),
}
"""Each loss with the defaults of the schema. `gspo` has the clip range of its paper, meant for answers of hundreds of
tokens, whose mean log-ratios are small; for the short answers here the range of `ppo` may be fairer: `gspo wide`."""
RATES = (1e-3, 2e-3)
CHOSEN_BY = range(5)
"""Ages by which the learning rate of a loss is chosen."""
SYMBOLS = 10


@dataclass(frozen=True)
class Settings:
    """What all runs have in common."""

    versions: int = 300
    groups: int = 8
    samples: int = 8
    length: int = 8
    width: int = 32
    layers: int = 2
    warm_reward: float = 0.4
    exam_every: int = 20
    exam_problems: int = 256


class Run(NamedTuple):
    """One curve: `rewards` are of the policy at `versions`, on fresh problems, sampled as in training."""

    loss: str
    age: int
    lr: float
    seed: int
    versions: list[int]
    rewards: list[float]
    cpu_s: float


class Model(nn.Module):
    """A causal transformer over digits, a separator, and learned positions."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS + 1, settings.width)
        self.position = nn.Parameter(torch.randn(2 * settings.length + 1, settings.width) * 0.1)
        self.blocks = nn.ModuleList(Block(settings.width) for _ in range(settings.layers))
        self.head = nn.Linear(settings.width, SYMBOLS)

    def forward(self, tokens: Tensor, past: list[Tensor | None] | None = None) -> Tensor:
        """[samples, tokens] int64 -> log-probabilities of the next digit, [samples, tokens, SYMBOLS].

        `past`: each block's keys and values of the tokens before these, to which those of these are added.
        """
        past = self.nothing_past() if past is None else past
        start = 0 if past[0] is None else past[0].shape[-2]
        x = self.embed(tokens) + self.position[start : start + tokens.shape[1]]
        for i, block in enumerate(self.blocks):
            x, past[i] = block(x, past[i])
        logits: Tensor = self.head(x)
        return logits.log_softmax(-1)

    def nothing_past(self) -> list[Tensor | None]:
        """What `past` is before the first token."""
        return [None] * len(self.blocks)


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """Also returns keys and values, [2, samples, heads, tokens, width / heads]."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        kv = qkv[1:] if past is None else torch.cat([past, qkv[1:]], dim=-2)
        mixed = functional.scaled_dot_product_attention(qkv[0], kv[0], kv[1], is_causal=past is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x)), kv


def problems(count: int, settings: Settings, random: torch.Generator) -> Tensor:
    """[count, length + 1]: digits and the separator."""
    digits = torch.randint(SYMBOLS, (count, settings.length), generator=random)
    return torch.cat([digits, torch.full((count, 1), SYMBOLS)], dim=1)


@torch.no_grad()
def sample(
    model: Model, prompts: Tensor, samples: int, settings: Settings, random: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`samples` answers to each prompt: tokens [answers, 2 length + 1], behaviour log-probabilities [answers, length],
    rewards [answers]: the share of digits in the right place."""
    past, digits, chosen = model.nothing_past(), [], []
    logprobs = model(prompts, past)[:, -1].repeat_interleave(samples, 0)
    past = [None if kv is None else kv.repeat_interleave(samples, 1) for kv in past]
    while True:
        digits.append(torch.multinomial(logprobs.exp(), 1, generator=random))
        chosen.append(logprobs.gather(1, digits[-1]))
        if len(digits) == settings.length:
            break
        logprobs = model(digits[-1], past)[:, -1]
    answers, prompts = torch.cat(digits, dim=1), prompts.repeat_interleave(samples, 0)
    right = answers == prompts[:, : settings.length].flip(1)
    return torch.cat([prompts, answers], dim=1), torch.cat(chosen, dim=1), right.float().mean(1)


def examine(model: Model, settings: Settings, random: torch.Generator) -> float:
    """Mean reward on fresh problems."""
    return float(sample(model, problems(settings.exam_problems, settings, random), 1, settings, random)[2].mean())


def answer_logprobs(model: Model, tokens: Tensor, settings: Settings) -> Tensor:
    """Log-probabilities of the answer's digits, [samples, length]."""
    answer = tokens[:, settings.length + 1 :]
    logprobs: Tensor = model(tokens[:, :-1])[:, settings.length :]
    return logprobs.gather(2, answer[..., None]).squeeze(2)


@cache
def warm_start(seed: int, settings: Settings) -> dict[str, Tensor]:
    """Weights of a model trained on right answers until it reaches `warm_reward`: good enough to get some rewards."""
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
    """Loss of a batch that version `sampler` sampled and `version` trains on. The batch is one microbatch, so that the
    limit of m2po and the proximal policy of decoupled need no forward pass of their own."""
    tokens, behaviour, rewards = data
    count = settings.groups * settings.samples
    advantages = ADVANTAGES[config.advantage](rewards, torch.arange(count) // settings.samples)
    logprobs = answer_logprobs(model, tokens, settings).flatten()
    inputs = LossInputs(
        policy_logprobs=logprobs,
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


def train(loss: str, age: int, lr: float, seed: int, settings: Settings) -> Run:
    """One curve. The first `age` batches are sampled by version 0, as in a run that starts with a full queue."""
    torch.set_num_threads(1)
    start = time.process_time()
    model, server = Model(settings), Model(settings)
    model.load_state_dict(warm_start(seed, settings))
    random, exam = torch.Generator().manual_seed(seed + 1), torch.Generator().manual_seed(seed + 2)
    config = CASES[loss]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    past: deque[dict[str, Tensor]] = deque(maxlen=age + 1)
    versions, rewards = [], []
    for version in range(settings.versions + 1):
        if version % settings.exam_every == 0:
            versions.append(version)
            rewards.append(round(examine(model, settings, exam), 4))
        past.append({name: value.clone() for name, value in model.state_dict().items()})
        server.load_state_dict(past[0])
        data = sample(server, problems(settings.groups, settings, random), settings.samples, settings, random)
        value = batch_loss(model, data, config, version - len(past) + 1, version, settings)
        optimizer.zero_grad()
        torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return Run(loss, age, lr, seed, versions, rewards, round(time.process_time() - start, 1))


def finals(runs: list[Run], loss: str, age: int, lr: float) -> list[float]:
    """Mean of the last fifth of the curve of each seed."""
    chosen = [run.rewards for run in runs if (run.loss, run.age, run.lr) == (loss, age, lr)]
    return [mean(rewards[-max(len(rewards) // 5, 1) :]) for rewards in chosen]


def final(runs: list[Run], loss: str, age: int, lr: float) -> float:
    """Mean over seeds."""
    return mean(finals(runs, loss, age, lr))


def choose(runs: list[Run]) -> dict[str, float]:
    """The learning rate at which each loss is shown: see the module's docstring."""
    ages, rates = sorted({run.age for run in runs}), sorted({run.lr for run in runs})
    judges = [age for age in ages if age in CHOSEN_BY] or ages

    def judged(loss: str, lr: float) -> float:
        return mean(final(runs, loss, age, lr) for age in judges)

    return {loss: max(rates, key=partial(judged, loss)) for loss in dict.fromkeys(run.loss for run in runs)}


def noise(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per rate: the largest difference between two losses at age 0, where all have the same gradient."""
    spreads: dict[float, float] = {}
    for lr in sorted({run.lr for run in runs if run.age == 0}):
        values = [final(runs, loss, 0, lr) for loss in dict.fromkeys(run.loss for run in runs)]
        spreads[lr] = max(values) - min(values)
    return [
        {
            "what": f"largest difference between losses at age 0, lr {lr:g}",
            "value": round(spread, 4),
            "unit": "reward in [0, 1]",
            "against": "the same without rounding",
            "against_value": 0.0,
        }
        for lr, spread in spreads.items()
    ]


def table(runs: list[Run], rates: dict[str, float]) -> str:
    """Final reward by loss and age."""
    ages = sorted({run.age for run in runs})
    lines = ["final reward".ljust(14) + "lr".rjust(8) + "".join(f"age {age}".rjust(9) for age in ages)]
    for loss, lr in rates.items():
        values = "".join(f"{final(runs, loss, age, lr):9.3f}" for age in ages)
        lines.append(LABELS.get(loss, loss).ljust(14) + f"{lr:8g}" + values)
    lines += [f"{row['what']}: {row['value']:.3f}" for row in noise(runs)]
    return "\n".join(lines)


def record(runs: list[Run], rates: dict[str, float], settings: Settings, seconds: float, load: float) -> dict[str, Any]:
    """The contents of staleness.json: a row per loss, age and rate, with the control at the same age; all curves."""
    rows = [
        {
            "what": f"{loss}, age {age}, lr {lr:g}{' (shown)' if lr == rates[loss] else ''}: final reward",
            "value": round(final(runs, loss, age, lr), 4),
            "seeds": [round(value, 4) for value in finals(runs, loss, age, lr)],
            "unit": "reward in [0, 1]",
            "against": f"{LABELS[CONTROL]}, age {age}, lr {rates[CONTROL]:g}",
            "against_value": round(final(runs, CONTROL, age, rates[CONTROL]), 4),
        }
        for loss, age, lr in dict.fromkeys((run.loss, run.age, run.lr) for run in runs)
    ]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores, load average {load:.1f} before the start",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": " ".join(["python -m benchmarks.staleness", *sys.argv[1:]]),
        "seconds": round(seconds),
        "cpu_seconds": round(sum(run.cpu_s for run in runs)),
        "settings": asdict(settings),
        "rates": rates,
        "rows": [*noise(runs), *rows],
        "curves": [run._asdict() for run in runs],
    }


def written(results: dict[str, Any]) -> str:
    """JSON with one line per row and curve."""
    fields = []
    for key, value in results.items():
        lines = ",\n".join("  " + json.dumps(one) for one in value) if isinstance(value, list) else ""
        fields.append(f" {json.dumps(key)}: " + (f"[\n{lines}\n ]" if lines else json.dumps(value)))
    return "{\n" + ",\n".join(fields) + "\n}\n"


def draw(runs: list[Run], rates: dict[str, float], path: Path) -> None:
    """One panel per age, one line per loss: mean over seeds. The last panel is the table: final reward against age."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ages = sorted({run.age for run in runs})
    width = (len(ages) + 2) // 2
    figure, grid = pyplot.subplots(2, width, figsize=(5 * width, 8), sharey=True, squeeze=False)
    panels, colors = list(grid.flat), pyplot.get_cmap("tab10")
    for i, (loss, lr) in enumerate(rates.items()):
        style: dict[str, Any] = {"color": colors(i), "label": f"{LABELS.get(loss, loss)}, lr {lr:g}"}
        style |= {"color": "black", "linestyle": "--"} if loss == CONTROL else {}
        for age, panel in zip(ages, panels, strict=False):
            chosen = [run for run in runs if (run.loss, run.age, run.lr) == (loss, age, lr)]
            curves = zip(*(run.rewards for run in chosen), strict=True)
            panel.plot(chosen[0].versions, list(map(mean, curves)), linewidth=1.5, **style)
            panel.set(title=f"age {age}", xlabel="version")
        panels[-1].plot([final(runs, loss, age, lr) for age in ages], marker="osv^DP*Xd<"[i], **style)
    panels[-1].set(title="final reward", xlabel="age", xticks=range(len(ages)), xticklabels=ages)
    for panel in panels[len(ages) : -1]:
        panel.set_axis_off()
    for panel in grid[:, 0]:
        panel.set(ylabel="reward on fresh problems", ylim=(0, 1))
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Reward against versions for every loss at fixed ages.")
    parser.add_argument("--losses", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ages", nargs="+", type=int, default=list(AGES))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--versions", type=int, default=Settings.versions)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    losses = args.losses if CONTROL in args.losses else [*args.losses, CONTROL]
    settings, start, load, runs = Settings(versions=args.versions), time.perf_counter(), os.getloadavg()[0], []
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        cases = product(losses, args.ages, args.rates, range(args.seeds))
        jobs = [pool.submit(train, *case, settings) for case in cases]
        for job in jobs:
            runs.append(run := job.result())
            line = f"{run.loss:9} age {run.age:3} lr {run.lr:g} seed {run.seed}: {run.rewards[-1]:.3f}"
            print(f"{line}  {run.cpu_s:.0f} s of CPU", flush=True)
    rates = choose(runs)
    print(table(runs, rates))
    args.results.mkdir(parents=True, exist_ok=True)
    results = record(runs, rates, settings, time.perf_counter() - start, load)
    (args.results / "staleness.json").write_text(written(results))
    draw(runs, rates, args.results / "staleness.png")


if __name__ == "__main__":
    main()
