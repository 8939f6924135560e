"""The cases `matmuls` and `rounding`: `learner.matmul: fp8` beside bfloat16, its speed and what it rounds.

`matmuls` builds one policy whose layers multiply in FP8 and in bfloat16 in turns, step by step, with the same weights,
memory and batches; then it profiles a step of each. `rounding` compares one batch's gradient and log-probabilities with
those of a policy in float32. Run by `benchmarks.learner` for `benchmarks.fp8_learner`, once on each rank of a case.
"""

import gc
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity
from transformers import AutoTokenizer

from benchmarks.learner.cases import LONGEST, SHAPES, Case, documents, part_of, sample_of
from benchmarks.learner.ours import OURS, batch, summed, timed, tokens
from buffer.wire.message import Array
from buffer.wire.sample import Sample
from configs.schema import AlgorithmConfig, LearnerConfig, ModelConfig
from learner.model import float8
from learner.model.gather_choice import choose_gather
from learner.model.memory import RankRoom, estimate, gpu_memory
from learner.model.microbatch import one_document
from learner.model.policy import Policy
from learner.train.optimizer import Optimizer
from learner.train.step import Algorithm

KINDS = ("bfloat16", "fp8")
WARM_UP = 2
GROUPS = (
    ("FP8 products", ("qqtst", "e4m3", "f8f8", "fp8", "float8")),
    ("attention", ("flash", "fmha", "attention", "fwd_sm90", "bwd_sm90")),
    ("other products", ("nvjet", "gemm", "cutlass", "cublas")),
    ("casts and scales", ("amax",)),
    ("fused elementwise", ("triton",)),
    ("optimizer", ("multi_tensor",)),
    ("between GPUs", ("nccl",)),
)
"""Kinds of kernels, and words in their names; the first that fits."""
TAKEN = {"kind": "fp8"}
"""How every `AlternatingLinear` layer multiplies; compiled code is made for each kind and chosen by it."""
PAGES = Path(__file__).parents[2] / "docs"


class AlternatingLinear(float8.Float8Linear):
    """A layer that multiplies as TAKEN says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if TAKEN["kind"] == "fp8" else linear(x, self.weight, self.bias)


def run(case: Case, folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Results of both kinds, and their profiles."""
    gpu, memory = mesh.device_type == "cuda", gpu_memory(torch.device(mesh.device_type))
    model = ModelConfig(path=str(folder), dtype="bfloat16")
    given = LearnerConfig(**(OURS | case.learner | {"matmul": "fp8"}))
    learner = choose_gather(model, given, RankRoom(mesh.size(), memory, LONGEST))
    expected = estimate(model, learner, mesh.size())
    policy, budget = Policy(model, learner, mesh, random=True), tokens(learner, expected, memory)
    algorithm = Algorithm(AlgorithmConfig(**case.algorithm), Optimizer(policy, learner, 100), budget, LONGEST)
    layers = [layer for layer in policy.model.modules() if type(layer) is float8.Float8Linear]
    for layer in layers:
        layer.__class__ = AlternatingLinear
    warm, found = min(case.samples, 16 * mesh.size()), dict[str, dict[str, Any]]()
    plan = [(kind, warm) for kind in KINDS for _ in range(WARM_UP)] + [
        (kind, case.samples) for kind in KINDS
    ] * case.steps
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for version, (kind, samples) in enumerate(plan):
        TAKEN["kind"] = kind
        rows[kind].append(timed(policy, algorithm, batch(policy, mesh, samples, len(rows[kind]), version)))
        if mesh.get_rank() == 0:
            print(f"{case.model} x{mesh.size()} {kind}: {rows[kind][-1]}", flush=True)
    shown = {}
    for version, kind in enumerate(KINDS):
        TAKEN["kind"] = kind
        shown[kind] = policy.logprobs_of([1 + n % 500 for n in range(300)])
        found[kind] = {"rows": rows[kind], **summed(rows[kind], mesh, expected)}
        if gpu:
            small = batch(policy, mesh, warm, 0, len(plan) + version)
            found[kind]["profile"] = profile(partial(algorithm.step, policy, small))
    if shown["fp8"] == shown["bfloat16"]:
        raise RuntimeError("both kinds have the same log-probabilities: the compiled blocks did not change")
    apart = [abs(a - b) for a, b in zip(shown["fp8"], shown["bfloat16"], strict=True)]
    about = {"budget": budget, "gather": learner.gather, "attention": policy.attention, "layers": len(layers)}
    return about | {"estimate": expected.describe(budget), "apart": sum(apart) / len(apart), "kinds": found}


def profile(step: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of GPU time of one step by kind of kernel, and its slowest kernels."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    kernels = [(each.key, each.self_device_time_total / 1e6, each.count) for each in found.key_averages()]
    sums: Counter[str] = Counter()
    for name, seconds, _ in kernels:
        sums[kind_of(name)] += seconds
    slowest = sorted(kernels, key=lambda kernel: -kernel[1])[:20]
    return {"groups": dict(sums), "slowest": [[name[:110], seconds, count] for name, seconds, count in slowest]}


def kind_of(kernel: str) -> str:
    """The first of GROUPS that a kernel's name fits. Example: `kind_of("triton_red_fused_abs_amax_0")`."""
    name = kernel.lower()
    return next((kind for kind, words in GROUPS if any(word in name for word in words)), "rest")


def rounding(case: Case, folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Relative error of the gradient, and distance of log-probabilities, against float32: of bfloat16, of FP8, and of
    FP8 with sums in float32."""
    path = case.path or str(folder)
    made = texts(path, case.samples) if case.path else short(case)
    found: dict[str, Any] = {}
    exact: dict[str, Tensor] = {}
    exact_logprobs = torch.zeros(0)
    for name in ("float32", "bfloat16", "fp8", "fp8, exact sums"):
        float8.FAST_SUMS = name == "fp8"
        gradients, logprobs = computed(path, name, made, mesh, case)
        if name == "float32":
            exact, exact_logprobs = gradients, logprobs
            continue
        apart = (logprobs - exact_logprobs).abs()
        found[name] = errors(gradients, exact) | {
            "logprob mean": float(apart.mean()),
            "logprob max": float(apart.max()),
        }
        print(f"{case.model} {name}: {found[name]}", flush=True)
    return {"rounding": found, "tokens": sum(sample.tokens.numpy().size for sample in made)}


def short(case: Case) -> list[Sample]:
    """Documents of at most 1,024 random tokens."""
    made = documents(4 * case.samples, 0, SHAPES[case.model]["vocab_size"])
    return [sample for sample in made if len(sample.tokens.numpy()) <= 1024][: case.samples]


def texts(path: str, samples: int) -> list[Sample]:
    """Documents of 512 tokens from the pages of docs/, the first 64 their prompts, by the model's tokenizer."""
    tokenizer, draw = AutoTokenizer.from_pretrained(path), np.random.default_rng(0)
    words = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    ids = np.array(tokenizer(words)["input_ids"], np.int32)
    pieces = [ids[start : start + 512] for start in range(0, len(ids) - 512, 512)][:samples]
    blank = [sample_of(draw, len(piece), 64, len(tokenizer)) for piece in pieces]
    return [one.model_copy(update={"tokens": Array.of(piece)}) for one, piece in zip(blank, pieces, strict=True)]


def computed(
    path: str, name: str, made: list[Sample], mesh: DeviceMesh, case: Case
) -> tuple[dict[str, Tensor], Tensor]:
    """The gradient of a batch by parameter, and its log-probabilities, in the precision `name`."""
    exact = name == "float32"
    model = ModelConfig(path=path, dtype="float32" if exact else "bfloat16")
    keys = {"matmul": "fp8" if name.startswith("fp8") else "bfloat16", "attention": "sdpa" if exact else "auto"}
    learner = LearnerConfig(compile=False, activation_checkpointing="none", gather="pass", share_prompts=False, **keys)
    policy = Policy(model, learner, mesh, random=case.path is None)
    algorithm = Algorithm(
        AlgorithmConfig(loss="dppo", tv_low=None, tv_high=None), Optimizer(policy, learner, 9), 4096, 1024
    )
    algorithm.backward(policy, algorithm.pack(policy, part_of(made, 0, mesh.get_rank(), mesh.size())))
    gradients = {key: local(parameter.grad).clone() for key, parameter in policy.model.named_parameters()}
    rows = (policy.place(one_document(sample.tokens.numpy().tolist())) for sample in made)
    logprobs = torch.cat([policy.score(row, temperature=1.0)[1:] for row in rows])
    del policy, algorithm
    gc.collect()
    return gradients, logprobs


def local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def errors(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """|g - g32| / |g32| over all parameters, by kind of layer, and the cosine; of this rank's shards."""
    apart, size, dot = (defaultdict[str, float](float) for _ in range(3))
    for name, want in exact.items():
        got, words = gradients[name].double(), name.split(".")
        kinds = ("all", words[-2]) if len(words) > 1 and words[-1] == "weight" and want.dim() > 1 else ("all",)
        for kind in kinds:
            apart[kind] += float((got - want.double()).square().sum())
            size[kind] += float(want.double().square().sum())
            dot[kind] += float((got * want.double()).sum())
            dot[f"{kind} own"] += float(got.square().sum())
    cosine = dot["all"] / (size["all"] * dot["all own"]) ** 0.5
    return {kind: (apart[kind] / size[kind]) ** 0.5 for kind in size if size[kind]} | {"cosine": cosine}
