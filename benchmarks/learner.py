"""The learner's whole step on GPUs: MFU, tokens/s, phases, memory, against transformers with padding and all logits.

`python -m benchmarks.learner [--only ours-1.5b,naive-1.5b,ours-7b-2,ours-7b-4,naive-7b-4,head] [--steps 2]` prints one
table and writes `benchmarks/results/learner.json`. Qwen2.5 shapes with random weights, lengths log-normal (median
1,000, at most 8,192 tokens), 512 samples a batch, cut as the buffer cuts; ours runs `Algorithm.step` as the learner
does. The naive one gets the same model, sharding, precision and samples (the first of the batch, as many as named), in
the largest microbatches that fit. FLOPs: `learner.flops`. Cases side by side where there are GPUs for them.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
LONGEST, MEDIAN, SIGMA, PROMPT = 8192, 1000, 0.8, 200
COMMON = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768,
          "num_hidden_layers": 28, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}  # fmt: skip
SHAPES = {
    "1.5b": COMMON | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
                      "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": COMMON | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "tiny": COMMON | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
                      "num_key_value_heads": 1, "vocab_size": 512, "tie_word_embeddings": True},
}  # fmt: skip
OURS = {"activation_checkpointing": "none", "compile": True, "tokens_per_microbatch": "auto", "head_chunk_tokens": 4096}


@dataclass
class Case:
    """One row of the table: what runs, on how many GPUs."""

    kind: str
    model: str = "1.5b"
    gpus: int = 1
    samples: int = 512
    steps: int = 2
    learner: dict[str, Any] = field(default_factory=dict)
    layers: int = 28
    profile: bool = False


CASES = {
    "ours-1.5b": Case("ours"),
    "naive-1.5b": Case("naive", samples=64, steps=1),
    "ours-7b-2": Case("ours", "7b", 2),
    "ours-7b-4": Case("ours", "7b", 4),
    "naive-7b-4": Case("naive", "7b", 4, samples=128, steps=1),
    "head": Case("head"),
}


def documents(samples: int, seed: int, vocabulary: int) -> list[Any]:
    """Samples as rollout servers make them: random tokens, the lengths log-normal."""
    from buffer.protocol import Array, Sample

    draw = np.random.default_rng(seed)
    lengths = np.exp(draw.normal(np.log(MEDIAN), SIGMA, samples)).clip(16, LONGEST).astype(int)
    made = []
    for length in lengths:
        sampled = np.arange(length) >= min(PROMPT, length // 2)
        sample = Sample(
            tokens=Array.of(draw.integers(0, vocabulary, length).astype(np.int32)),
            sampled=Array.of(sampled.astype(np.uint8)),
            logprobs=Array.of(np.where(sampled, -np.log(vocabulary), 0).astype(np.float32)),
            versions=Array.of(np.where(sampled, 0, -1).astype(np.int32)),
            reward=float(draw.integers(2)),
            finish="stop",
        )
        made.append(sample)
    return made


def part_of(made: list[Any], version: int, rank: int, world: int) -> Any:
    """Rank's part of a batch in groups of 8, cut as the buffer cuts."""
    from buffer.parts import cut
    from buffer.protocol import Part, PartSample

    rewards = [[sample.reward for sample in made[start : start + 8]] for start in range(0, len(made), 8)]
    entries = [
        PartSample(item=i // 8, index=i % 8, dispatched=0, rewards=rewards[i // 8], sample=sample.pack())
        for i, sample in enumerate(made)
    ]
    tokens = [sample.tokens.shape[0] for sample in made]
    sampled = sum(int(sample.sampled.numpy().sum()) for sample in made)
    return Part(
        version=version, rank=rank, world=world, samples=[entries[i] for i in cut(tokens, world)[rank]],
        total_groups=len(rewards), total_samples=len(made), total_tokens=sum(tokens), total_sampled=sampled,
    )  # fmt: skip


def run_ours(case: Case, folder: Path, mesh: Any) -> dict[str, Any]:
    """Steps of the learner's own parts; one small batch before them warms the compiler up."""
    from configs.schema import AlgorithmConfig, LearnerConfig, ModelConfig
    from learner.flops import peak
    from learner.memory import GIB, SHARE, estimate
    from learner.optimizer import Optimizer
    from learner.policy import Policy
    from learner.step import Algorithm

    model = ModelConfig(path=str(folder), dtype="bfloat16" if mesh.device_type == "cuda" else "float32")
    learner = LearnerConfig(**(OURS | case.learner))
    expected = estimate(model, learner, mesh.size())
    gpu = mesh.device_type == "cuda"
    everything = torch.cuda.get_device_properties(0).total_memory if gpu else 8 * GIB
    wanted = learner.tokens_per_microbatch
    budget = max(expected.fit(int(SHARE * everything)), LONGEST) if wanted == "auto" else wanted
    started = time.perf_counter()
    policy = Policy(model, learner, mesh, random=True)
    algorithm = Algorithm(AlgorithmConfig(), Optimizer(policy, learner, 100), budget, LONGEST)
    vocabulary, rank = policy.model.config.vocab_size, mesh.get_rank()
    rows: list[dict[str, Any]] = []
    loaded = time.perf_counter() - started
    warm = min(case.samples, 64 * mesh.size())
    for version, samples in enumerate([warm, warm, *[case.samples] * case.steps]):
        part = part_of(documents(samples, version, vocabulary), version, rank, mesh.size())
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        torch.distributed.barrier()
        start = time.perf_counter()
        figures = algorithm.step(policy, part)
        torch.distributed.barrier()
        seconds = time.perf_counter() - start
        rows.append({"seconds": seconds, "tokens": figures["tokens"], "flops": figures["flops"]}
                    | {key: value for key, value in figures.items() if key.startswith("time/")}
                    | {"microbatches": figures["microbatches"], "largest": figures["tokens_microbatch_max"],
                       "loss": figures["loss"],
                       "norm": figures.get("gradient/norm"),
                       "gib": torch.cuda.max_memory_allocated() / GIB if gpu else 0.0,
                       "reserved_gib": torch.cuda.max_memory_reserved() / GIB if gpu else 0.0})  # fmt: skip
        print(f"{case.kind} {case.model} x{mesh.size()} step {version}: {rows[-1]}", flush=True)
    if case.profile:
        small = part_of(documents(warm, 0, vocabulary), len(rows), rank, mesh.size())
        profile(lambda: algorithm.step(policy, small))
    top = peak(torch.cuda.get_device_name()) if gpu else 989e12
    measured = rows[2:]
    return {
        "rows": rows,
        "budget": budget,
        "loaded_s": loaded,
        "attention": policy.attention,
        "seconds": median(row["seconds"] for row in measured),
        "tokens_per_s": sum(row["tokens"] for row in measured) / sum(row["seconds"] for row in measured),
        "flops_per_s": sum(row["flops"] for row in measured) / sum(row["seconds"] for row in measured) / mesh.size(),
        "peak": top,
        "gib": max(row["gib"] for row in measured),
        "estimate_gib": expected.total(int(max(row["largest"] for row in measured))) / GIB,
        "estimate": expected.words(budget),
        "warm_s": rows[0]["seconds"],
    }


def profile(step: Any) -> None:
    """Kernels of one step by time, on stdout."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=90), flush=True)


def run_naive(case: Case, folder: Path, mesh: Any) -> dict[str, Any]:
    """The same model by transformers: rows padded to the longest, all logits, gradient checkpointing, FSDP2, AdamW."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.utils import clip_grad_norm_

    from configs.schema import ModelConfig
    from learner import initial
    from learner.flops import Costs

    gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    model = initial.skeleton(ModelConfig(path=str(folder)), "sdpa")
    costs = Costs.of(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in initial.blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    initial.draw(model, device)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    made = documents(512, 2, model.config.vocab_size)[: case.samples]
    texts = [torch.from_numpy(sample.tokens.numpy().astype(np.int64)) for sample in made]
    mine = texts[mesh.get_rank() :: mesh.size()]

    def backward(rows: list[torch.Tensor]) -> None:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        (-(logprobs * mask[:, 1:]).sum() / 1e5).backward()

    size = min(len(mine), 4)
    while True:  # the largest power of two that takes the longest sample (8 never did); a rank in want is one for all
        full = torch.zeros(1, device=device)
        try:
            backward([torch.zeros(LONGEST, dtype=torch.int64)] * size)
        except torch.OutOfMemoryError:
            full += 1
        adamw.zero_grad()
        torch.distributed.all_reduce(full)
        if not full or size == 1:
            break
        size //= 2
        torch.cuda.empty_cache()
    torch.distributed.barrier()
    torch.cuda.synchronize() if gpu else None
    start = time.perf_counter()
    for at in range(0, len(mine), size):
        backward(mine[at : at + size])
    norm = clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    assert torch.isfinite(norm)
    torch.distributed.barrier()
    torch.cuda.synchronize() if gpu else None
    seconds, tokens = time.perf_counter() - start, sum(map(len, texts))
    flops = costs.total((len(text), len(text) - min(PROMPT, len(text) // 2)) for text in texts)
    answer = {"seconds": seconds, "tokens_per_s": tokens / seconds, "microbatch_samples": size}
    return answer | {"flops_per_s": flops / seconds / mesh.size(), "tokens": tokens}


def run_head(case: Case, folder: Path, mesh: Any) -> dict[str, Any]:
    """Forward and backward of the head alone, 1.5B: ours, all logits at once, Liger's fused loss where installed."""
    from learner.head import logprobs_and_entropy

    vocabulary, width, answer = 151936, 1536, {}
    weight = (torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()

    def naive(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None]).sum()

    def ours(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return logprobs_and_entropy(hidden, weight, targets, chunk=4096)[0].sum()

    heads = {"ours": ours, "naive": naive}
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        heads["liger"] = lambda hidden, targets: LigerFusedLinearCrossEntropyLoss(reduction="sum")(
            weight, hidden, targets
        )
    except ImportError:
        print("head: liger-kernel is not installed", flush=True)
    for tokens in (4096, 16384, 32768):
        for name, head in heads.items():
            hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            targets = torch.randint(vocabulary, (tokens,), device="cuda")
            times = []
            for _ in range(4):
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                before, start = torch.cuda.memory_allocated(), time.perf_counter()
                head(hidden, targets).backward()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
                gib = (torch.cuda.max_memory_allocated() - before) / 2**30
                weight.grad = hidden.grad = None
            answer[f"{name} {tokens}"] = {"ms": 1e3 * median(times[1:]), "gib": gib}
    return {"heads": answer}


KINDS = {"ours": run_ours, "naive": run_naive, "head": run_head}


def rank(folder: Path) -> None:
    """One rank of one case."""
    from datetime import timedelta

    from torch.distributed.device_mesh import init_device_mesh

    case = Case(**json.loads((folder / "case.json").read_text()))
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=240))
    mesh = init_device_mesh("cuda" if gpu else "cpu", (case.gpus,))
    answer = KINDS[case.kind](case, folder, mesh)
    if mesh.get_rank() == 0:
        (folder / "answer.json").write_text(json.dumps(answer))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def begin(case: Case, folder: Path, first: int, port: int) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of `case` on the GPUs from `first` on."""
    folder.mkdir(parents=True)
    shape = SHAPES[case.model]
    layers = min(case.layers, int(str(shape["num_hidden_layers"])))
    (folder / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": layers, "dtype": "bfloat16"}))
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    shared = {
        "WORLD_SIZE": str(case.gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(str(first + i) for i in range(case.gpus)),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "4",
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.learner", "--rank", str(folder)]
    return [
        subprocess.Popen(command, cwd=ROOT, env=os.environ | shared | {"RANK": str(number), "LOCAL_RANK": str(number)})
        for number in range(case.gpus)
    ]


def together(cases: dict[str, Case], folder: Path, gpus: int, limit_s: float) -> dict[str, dict[str, Any]]:
    """Run `cases`, as many at a time as there are GPUs for; those that fail or outlast `limit_s` have no answer."""
    answers, waiting, port = {}, dict(cases), 29610
    while waiting:
        first, started, deadline = 0, {}, time.monotonic() + limit_s
        for name, case in list(waiting.items()):
            if first + case.gpus <= gpus:
                started[name] = begin(waiting.pop(name), folder / name, first, port)
                first, port = first + case.gpus, port + 1
        if not started:
            print(f"not run, for want of GPUs: {', '.join(waiting)}", flush=True)
            break
        for name, processes in started.items():
            for process in processes:
                try:
                    process.wait(max(deadline - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    print(f"{name}: not done in {limit_s:.0f} s", flush=True)
                    process.kill()
            path = folder / name / "answer.json"
            if path.exists():
                answers[name] = json.loads(path.read_text())
    return answers


def table(answers: dict[str, dict[str, Any]], speed: float) -> list[dict[str, Any]]:
    """The rows of the result: each value beside what it is against."""
    rows: list[dict[str, Any]] = []

    def add(what: str, value: float, unit: str, against: str, other: float | None) -> None:
        rows.append({"what": what, "value": value, "unit": unit, "against": against, "against_value": other})

    for name, found in answers.items():
        if name.startswith("ours"):
            add(f"{name}: MFU of the whole step", found["flops_per_s"] / found["peak"], "", "target", 0.5)
            add(f"{name}: TFLOP/s a GPU", found["flops_per_s"] / 1e12, "TFLOP/s", "matrix product measured", speed)
            add(f"{name}: peak memory", found["gib"], "GiB", "estimate", found["estimate_gib"])
            naive = answers.get(name.replace("ours", "naive"))
            other = naive["tokens_per_s"] if naive else None
            add(f"{name}: tokens/s", found["tokens_per_s"], "tokens/s", "naive", other)
            for phase in ("pack", "backward", "update"):
                spent = median(row[f"time/{phase}_s"] for row in found["rows"][2:])
                add(f"{name}: {phase}", spent, "s", "whole step", found["seconds"])
    if {"ours-7b-2", "ours-7b-4"} <= answers.keys():
        two, four = (answers[f"ours-7b-{n}"]["tokens_per_s"] for n in (2, 4))
        add("7b: scaling from 2 to 4 GPUs", four / two / 2, "", "target", 0.9)
    for name, found in answers.get("head", {}).get("heads", {}).items():
        rival = answers["head"]["heads"].get(f"naive {name.split()[1]}")
        add(f"head {name} tokens", found["ms"], "ms", "naive", rival["ms"])
        add(f"head {name} tokens: memory", found["gib"], "GiB", "naive", rival["gib"])
    return rows


def product_tflops() -> float:
    """bf16 TFLOP/s of an 8192-cubed matrix product on random data, here and now; 0 without a GPU."""
    code = (
        "import torch,time\na,b=(torch.randn(8192,8192,device='cuda',dtype=torch.bfloat16) for _ in 'ab')\n"
        "for n in (3,30):\n torch.cuda.synchronize();t=time.perf_counter()\n for _ in range(n): a@b\n"
        " torch.cuda.synchronize()\nprint(2*8192**3*30/(time.perf_counter()-t)/1e12)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return float(ended.stdout) if ended.returncode == 0 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--cases", type=json.loads, help='other cases: {"name": {"kind": "ours", "samples": 128}}')
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each set of cases")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        return rank(chosen.rank)
    cases = {name: CASES[name] for name in chosen.only.split(",")}
    cases = {name: Case(**told) for name, told in chosen.cases.items()} if chosen.cases else cases
    for case in cases.values():
        case.steps = chosen.steps or case.steps
    gpus = torch.cuda.device_count()
    hardware = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "CPU"
    with tempfile.TemporaryDirectory() as folder:
        speed = product_tflops()
        answers = together(cases, Path(folder), gpus or 2, chosen.limit)
    rows = table(answers, speed)
    record = {"date": time.strftime("%Y-%m-%d"), "hardware": hardware, "command": "python -m " + " ".join(
        ["benchmarks.learner", *sys.argv[1:]]), "versions": {"python": platform.python_version(),
        "torch": torch.__version__}, "product_tflops": speed, "rows": rows, "cases": answers}  # fmt: skip
    place = Path(os.environ.get("OUT", RESULTS)) / "learner.json"
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(record, indent=1))
    for name, found in answers.items():
        if "estimate" in found:
            print(f"{name}: {found['budget']} tokens a microbatch, {found['attention']}: {found['estimate']}")
    print(f"{hardware}; 8192-cubed bf16 product {speed:.0f} TFLOP/s; peak by datasheet 989")
    for row in rows:
        other = "not run" if row["against_value"] is None else f"{row['against_value']:.4g}"
        print(f"{row['what']:<45}{row['value']:>12.4g} {row['unit']:<9} {row['against']}: {other}")


if __name__ == "__main__":
    main()
