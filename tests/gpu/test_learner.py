"""The learner on NVIDIA GPUs: kernels against plain arithmetic, the attentions against each other, compiled and not."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.schema import AlgorithmConfig
from learner.model import attention
from learner.model.head import HeadOptions, chunked_loss, logprobs_and_entropy
from learner.model.kernels import joined, tried
from learner.model.microbatch import CopiedPrompts, SharedPrompts, lay_out
from learner.train.batch import Batch
from tests.harness import world
from tests.harness.world import LEARNER, algorithm_of, cut, make_groups, make_samples, plain, policy_of, tiny_model
from tests.learner.model.test_attention import documents, packed, padded_scores
from tests.learner.model.test_shared_prompts import (
    FORMS,
    MIXED,
    Groups,
    attending,
    by_mask,
    inputs_of,
    largest_error,
    row_of,
    visible,
    with_gradients,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
NAMES = ["sdpa", "varlen", *(name for name in attention.PACKAGES if attention.installed(name))]
KERNELS = [
    "varlen",
    *(
        pytest.param(name, marks=pytest.mark.skipif(not attention.installed(name), reason=f"needs {package}"))
        for name, (package, _) in attention.PACKAGES.items()
    ),
]
"""All that share prompts on a GPU."""
FLASH4 = pytest.mark.skipif(not attention.installed("flash4"), reason="needs flash-attn-4[cu13]")
WIDTHS = [8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256]
"""Numbers of a head."""
LONG: Groups = [(700, [130, 260, 5]), (1, [64, 64, 3]), (40, [7]), (129, [1] * 16), (300, [513])]
"""Longer and shorter than the kernels' blocks of 64, 128 and 192."""
Places = tuple[torch.Tensor, int, SharedPrompts | CopiedPrompts | None]


@pytest.fixture
def gpu() -> Iterator[DeviceMesh]:
    """A world of one rank on the first GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert difference < tolerance, float(difference)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("vocabulary", "tokens"), [(5003, 300), (64, 7), (151936, 33)])
def test_head(vocabulary: int, tokens: int, entropy_gradient: bool) -> None:
    """The fused passes against float64 of the same bf16 inputs."""
    draw = torch.Generator("cuda").manual_seed(vocabulary)
    hidden, weight = (
        torch.randn(n, 128, device="cuda", generator=draw).mul(0.3).bfloat16().requires_grad_()
        for n in (tokens, vocabulary)
    )
    targets = torch.randint(vocabulary, (tokens,), device="cuda", generator=draw)
    by = torch.randn(2, tokens, device="cuda", generator=draw)
    got = logprobs_and_entropy(hidden, weight, targets, HeadOptions(0.7, 128, entropy_gradient))
    (got[0] @ by[0] + (got[1] @ by[1] if entropy_gradient else 0)).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp = (exact[0] @ exact[1].T / 0.7).log_softmax(-1)
    want = logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)
    (want[0] @ by[0].double() + (want[1] @ by[1].double() if entropy_gradient else 0)).backward()
    for ours, theirs in zip(got, want, strict=True):
        near(ours.detach(), theirs.detach(), 1e-4)
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        near(ours.grad, theirs.grad, 1e-2)


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize(("vocabulary", "tokens"), [(5003, 300), (151936, 33), (64, 0)])
def test_chunked_loss(vocabulary: int, tokens: int, bonus: bool) -> None:
    """Gradients made in the forward pass against those made in the backward pass, of the same kernels."""
    draw = torch.Generator("cuda").manual_seed(vocabulary)
    hidden, weight = (
        torch.randn(n, 128, device="cuda", generator=draw).mul(0.3).bfloat16().requires_grad_()
        for n in (tokens, vocabulary)
    )
    targets = torch.randint(vocabulary, (tokens,), device="cuda", generator=draw)
    by = torch.randn(2, tokens, device="cuda", generator=draw)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, chunk: slice) -> torch.Tensor:
        terms = by[0][chunk] * logprobs.sin()
        return (terms + by[1][chunk] * entropy.cos() if bonus else terms).sum()

    *scores, total = chunked_loss(hidden, weight, targets, loss, HeadOptions(0.7, 128, bonus))
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, HeadOptions(0.7, 128, bonus))
    want = loss(logprobs, entropy, slice(None))
    assert torch.equal(scores[0], logprobs) and torch.equal(scores[1], entropy)
    for a, b in zip(*(torch.autograd.grad(2 * x, (hidden, weight)) for x in (total, want)), strict=True):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()


@pytest.mark.parametrize("form", ["alone", *FORMS])
@pytest.mark.parametrize("loss", ["dppo", "m2po", "gspo"])
def test_no_microbatch_waits_for_the_gpu(tmp_path: Path, gpu: DeviceMesh, loss: str, form: str) -> None:
    """From the forward pass to the end of the backward pass the CPU only launches kernels."""
    learner = LEARNER.model_copy(update={"attention": "varlen"})
    policy, share = policy_of(tiny_model(tmp_path, dtype=torch.bfloat16), gpu, learner), form in FORMS
    policy.sharing.most_copied = FORMS.get(form, 0.0)
    step, entries = algorithm_of(policy, 200, AlgorithmConfig(loss=loss)), make_samples(long=90)
    entries = make_groups() if share else entries
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), 200, share_prompts=share)
    assert (batch.microbatches[0].shared is not None) == share
    shared = step.shared_context(batch, policy.device) | {"m2_limit": torch.ones((), device="cuda")}
    microbatch = policy.place(batch.microbatches[0])
    step.backward_of(policy, microbatch, shared)  # compiles kernels, records FSDP's order
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.backward_of(policy, microbatch, shared)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_attentions_are_equal(heads: tuple[int, int]) -> None:
    lengths = [5, 130, 1, 700, 64]
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    draw = torch.Generator("cuda").manual_seed(0)
    sizes = (heads[0], heads[1], heads[1])
    inputs = [torch.randn(1, n, sum(lengths), 64, device="cuda", generator=draw).bfloat16() for n in sizes]
    by = torch.randn(1, sum(lengths), heads[0], 64, device="cuda", generator=draw).bfloat16()
    found = {}
    for name in NAMES:
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out, _ = attention.ATTENTIONS[name](None, q, k, v, None, cu_seq_lens_q=starts, max_length_q=max(lengths))
        out.backward(by)
        found[name] = (out.detach(), q.grad, k.grad, v.grad)
    for name in NAMES[1:]:
        for ours, theirs in zip(found[name], found["sdpa"], strict=True):
            near(ours, theirs, 1e-2)


@pytest.mark.parametrize("groups", [MIXED, LONG, [(9, [3, 5])]], ids=["mixed", "long", "one group"])
@pytest.mark.parametrize(("heads", "head_dim"), [((12, 2), 128), ((4, 4), 64)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KERNELS)
def test_shared_prompts_by_an_explicit_mask(
    name: str, form: str, heads: tuple[int, int], head_dim: int, groups: Groups
) -> None:
    """In bf16, against fp32 arithmetic on the same inputs; beside it the kernel without sharing."""
    errors = []
    for share in (True, False):
        row = row_of(groups, share, form)
        given = [x.cuda() for x in inputs_of(row, heads, torch.bfloat16, head_dim)]
        seen = visible(row).cuda()
        wanted = with_gradients(lambda q, k, v, seen=seen: by_mask(q, k, v, seen), *(x.float() for x in given))
        found = with_gradients(attending(row.to(torch.device("cuda")), name), *given)
        assert all(x.isfinite().all() for x in found)
        errors.append(largest_error(found, wanted))
    assert errors[0] < 2e-2 and errors[0] < 2.5 * errors[1] + 1e-3, errors


@pytest.mark.parametrize(
    ("name", "width"),
    [
        *(("varlen", width) for width in WIDTHS),
        *(pytest.param("flash4", width, marks=FLASH4) for width in WIDTHS if attention.has_gradients(width)),
    ],
)
def test_heads_of_every_width_that_is_accepted(name: str, width: int) -> None:
    """In bf16, against fp32 arithmetic."""
    row = row_of(LONG, share=False)
    for heads in ((4, 2), (4, 4)):
        given = [x.cuda() for x in inputs_of(row, heads, torch.bfloat16, width)]
        seen = visible(row).cuda()
        wanted = with_gradients(lambda q, k, v, seen=seen: by_mask(q, k, v, seen), *(x.float() for x in given))
        found = with_gradients(attending(row.to(torch.device("cuda")), name), *given)
        assert largest_error(found, wanted) < 2e-2


@pytest.mark.parametrize(
    ("name", "width"), [("varlen", 64), ("varlen", 80), *(pytest.param("flash4", x, marks=FLASH4) for x in (64, 80))]
)
def test_the_trial_before_a_run_finds_wrong_gradients(name: str, width: int) -> None:
    for window in (None, tried.WINDOW):
        found = tried.fault(name, torch.device("cuda", 0), torch.bfloat16, tried.Heads(12, 2, width, window))
        assert ("off on heads" in found) == (name == "flash4" and not attention.has_gradients(width)), found


@pytest.mark.parametrize("name", KERNELS)
def test_attentions_of_whole_pieces(name: str) -> None:
    """Not causal: every token of a piece sees all of it."""
    row = row_of(LONG, share=False)
    given = [x.cuda() for x in inputs_of(row, (4, 4), torch.bfloat16, 64)]
    piece = torch.bucketize(torch.arange(len(row.tokens)), row.cu_seqlens[1:], right=True)
    seen = (piece[:, None] == piece).cuda()
    wanted = with_gradients(lambda q, k, v: by_mask(q, k, v, seen), *(x.float() for x in given))
    found = with_gradients(attending(row.to(torch.device("cuda")), name, causal=False), *given)
    assert largest_error(found, wanted) < 2e-2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KERNELS)
def test_shared_prompts_compiled(name: str, form: str) -> None:
    """One graph without a break, for rows of several kinds and lengths, and what the kernel gives by itself."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()

    def block(x: torch.Tensor, weights: list[torch.Tensor], places: Places, options: joined.Options) -> torch.Tensor:
        q, k, v = ((x @ weight).view(x.shape[0], -1, 64) for weight in weights)
        return torch.nn.functional.silu(joined.attention(q, k, v, *places, options).flatten(1))

    compiled = torch.compile(block, dynamic=True, fullgraph=True)
    draw = torch.Generator("cuda").manual_seed(0)
    weights = [0.1 * torch.randn(96, 64 * n, device="cuda", generator=draw) for n in (4, 2, 2)]
    weights = [weight.bfloat16().requires_grad_() for weight in weights]
    for groups in (MIXED[:3], LONG, [(50, [20, 60])], MIXED):
        row = row_of(groups, form=form).to(torch.device("cuda"))
        places, options = (row.cu_seqlens, row.max_seqlen, row.shared), (True, 0.125, None, name)
        x = torch.randn(len(row.tokens), 96, device="cuda", generator=draw).bfloat16().requires_grad_()
        found = []
        for call in (block, compiled):
            out = call(x, weights, places, options)
            found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *weights])])
        assert largest_error(*found) < 3e-2
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def shared_step(
    model, mesh: DeviceMesh, share: bool, budget: int, form: str = "joined", **changes
) -> tuple[dict[str, torch.Tensor], Batch]:
    policy = policy_of(model, mesh, LEARNER.model_copy(update={"share_prompts": share} | changes))
    assert policy.sharing.prompts == share
    policy.sharing.most_copied = FORMS[form]
    entries = make_groups()
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), budget, policy.costs.quadratic, policy.sharing.prompts)
    algorithm_of(policy, budget).backward(policy, batch)
    return world.gradients(policy), batch


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KERNELS)
def test_shared_prompts_change_no_step(tmp_path: Path, gpu: DeviceMesh, name: str, form: str, compiled: bool) -> None:
    """Gradients of a whole step in bf16, with and without: both are equally far from those in fp32."""
    torch._dynamo.reset()
    model = tiny_model(tmp_path, dtype=torch.bfloat16)
    exact, _ = shared_step(model.model_copy(update={"dtype": "float32"}), gpu, False, 300, attention="sdpa")
    options = {"attention": name, "activation_checkpointing": "none", "compile": compiled}
    errors, tokens = [], []
    for share in (True, False):
        found, batch = shared_step(model, gpu, share, 300, form, **options)
        parameters = [one for one in exact if "k_proj.bias" not in one]  # attention does not depend on it
        squares = [float((found[one] - exact[one]).norm() / exact[one].norm()) ** 2 for one in parameters]
        errors.append((sum(squares) / len(squares)) ** 0.5)
        tokens.append(batch.tokens)
    assert tokens[0] < tokens[1]
    assert errors[0] < 1.5 * errors[1] + 1e-2 < 0.1, errors


@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_padded(tmp_path: Path, gpu: DeviceMesh, name: str) -> None:
    config, texts = tiny_model(tmp_path, dtype=torch.bfloat16), documents()
    learner = LEARNER.model_copy(update={"attention": name})
    got = policy_of(config, gpu, learner, temperature=0.8).score(packed(texts).to(torch.device("cuda")))
    want = padded_scores(plain(config).float(), texts, 0.8)
    assert (got.cpu() - want).abs().mean() < 0.03


def gradients(model, mesh: DeviceMesh, **changes) -> dict[str, torch.Tensor]:
    policy = policy_of(model, mesh, LEARNER.model_copy(update=changes))
    step, entries = algorithm_of(policy, 200), make_samples(long=90)
    step.backward(policy, Batch.from_part(cut(entries, 3, [len(entries)], 0), 200))
    return world.gradients(policy)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": "none"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "none", "compile": True},
        {"activation_checkpointing": "block", "compile": True},
        {"activation_checkpointing": 1, "compile": True},
        {"cpu_offload": True},
        {"gather": 0},
        {"gather": 1, "activation_checkpointing": "none", "compile": True},
        {"gather": "batch"},
        {"gather": "batch", "activation_checkpointing": "none", "compile": True},
        {"gather": "batch", "cpu_offload": True},
    ],
    ids=str,
)
def test_ways_to_save_change_nothing(tmp_path: Path, gpu: DeviceMesh, changes: dict) -> None:
    model = tiny_model(tmp_path, dtype=torch.bfloat16)
    want, got = gradients(model, gpu), gradients(model, gpu, **changes)
    assert want.keys() == got.keys()
    for name, gradient in want.items():
        if "k_proj.bias" not in name:  # attention does not depend on it
            near(got[name].cuda(), gradient, 5e-2)


def test_compiled_once_for_all_blocks_and_lengths(tmp_path: Path, gpu: DeviceMesh) -> None:
    torch._dynamo.reset()
    learner = LEARNER.model_copy(update={"compile": True, "activation_checkpointing": "none"})
    policy = policy_of(tiny_model(tmp_path, dtype=torch.bfloat16), gpu, learner)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for lengths in ([40, 3, 9], [17] * 11, [200]):
        texts = [[1] * n for n in lengths]
        row = lay_out(texts, texts, [[0] * n for n in lengths], [[0] * n for n in lengths], list(range(len(texts))))
        policy(row.to(torch.device("cuda")))[0].sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("gather", world.GATHERS)
def test_ranks_change_nothing(tmp_path: Path, gpu: DeviceMesh, gather: str | int) -> None:
    """Two ranks over NCCL against one, in fp32."""
    model = tiny_model(tmp_path / "model", tied=True)
    want = gradients(model, gpu)
    arguments = {"device": "cuda", "long": 90, "algorithms": [world.ALGORITHM.model_dump(mode="json")]}
    world.together("gradients", 2, tmp_path, cuts=[[12, 12], [24, 0]], budgets=[200], gather=gather, **arguments)
    found = torch.load(tmp_path / "gradients.pt", map_location="cuda")
    assert len(found) == 2
    for got in found.values():
        for name, gradient in want.items():
            near(got[name], gradient, 1e-4)


def test_an_update_is_queued_while_the_gpu_works(tmp_path: Path, gpu) -> None:
    """Its metrics wait for the norm alone, and a step that is not finite changes nothing."""
    policy = policy_of(tiny_model(tmp_path), gpu)
    optimizer, stream = algorithm_of(policy, 64).optimizer, torch.cuda.current_stream()
    for version, value in enumerate((0.25, 0.25, torch.inf)):
        for parameter in policy.parameters():
            parameter.grad = torch.full_like(parameter, value)
        before = world.weights(policy)
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)
        queued = optimizer.queue(version)
        early = not stream.query()
        torch.cuda._sleep(10**9)
        metrics = optimizer.finish(queued)
        behind = not stream.query()
        after = world.weights(policy)
        same = all(torch.equal(old, after[name]) for name, old in before.items())
        assert (metrics["gradient/skipped"], same) == (value == torch.inf, value == torch.inf)
        assert early or version == 0, "the first update allocates"
        assert behind or version == 0 or value == torch.inf, "then its parts are looked at"
        del queued  # its pinned memory is used again; to allocate some waits for the GPU
