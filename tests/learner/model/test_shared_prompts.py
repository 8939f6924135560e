"""Rows whose answers share prompts: layout, attention against an explicit mask, and one graph for a compiled block."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3NextConfig

from configs.schema import LoraConfig
from learner.model import attention
from learner.model.compiling import MOST_GRAPHS
from learner.model.kernels import joined
from learner.model.kernels.implementations import KERNELS
from learner.model.kernels.sequences import Sequences
from learner.model.lora.base import Base
from learner.model.microbatch import CopiedPrompts, Microbatch, SharedPrompts, lay_out
from learner.model.policy import _Gather
from tests.harness.lanes import long_but
from tests.harness.world import LEARNER, policy_of, tiny_model

Groups = Sequence[tuple[int, Sequence[int]]]
"""Tokens of each prompt, and of the answers to it."""
MIXED: Groups = [(17, [5, 9, 1]), (3, [4]), (40, [1, 7]), (1, [3, 3, 3, 3]), (25, [6]), (64, [30] * 16)]


FORMS = {"joined": 0.0, "copied": np.inf}
"""Keys that a row copies at most, as a multiple of its tokens, so that it is of this form."""


def row_of(groups: Groups, share: bool = True, form: str = "joined") -> Microbatch:
    """A row with the prompts of groups of several answers shared, or with every sample a whole document."""
    draw = np.random.default_rng(0)
    texts = [[draw.integers(0, 64, n) for n in (prompt, *answers)] for prompt, answers in groups]
    many = [text for text in texts if share and len(text) > 2]
    whole = [(prompt, one) for prompt, *rest in texts if not (share and len(rest) > 1) for one in rest]
    pieces = [text[0] for text in many] + [one for text in many for one in text[1:]]
    sampled = [np.zeros(len(text[0])) for text in many] + [np.ones(len(one)) for text in many for one in text[1:]]
    pieces += [np.concatenate(x) for x in whole]
    sampled += [np.repeat([0, 1], [len(prompt), len(answer)]) for prompt, answer in whole]
    zeros = [np.zeros(len(ids)) for ids in pieces]
    row = lay_out(pieces, sampled, zeros, zeros, list(range(len(pieces))), [len(text) - 1 for text in many])
    return row.copying(FORMS[form])


def visible(row: Microbatch) -> Tensor:
    """[tokens, tokens] bool: which keys each query sees, from the row's description alone."""
    place, device = torch.arange(len(row.tokens)), torch.device("cpu")
    piece = torch.bucketize(place, row.cu_seqlens.to(device)[1:], right=True)
    seen = (piece[:, None] == piece) & (place[:, None] >= place)
    shared = row.shared
    if isinstance(shared, CopiedPrompts):
        bounds = zip(row.cu_seqlens.tolist(), row.cu_seqlens[1:].tolist(), strict=False)
        for (start, stop), keys in zip(bounds, shared.keys.split(shared.starts.diff().tolist()), strict=True):
            for query in range(start, stop):
                seen[query, keys[: len(keys) - (stop - 1 - query)].to(device)] = True
    elif shared:
        of_prompt = torch.bucketize(place, shared.prompt_starts.to(device)[1:], right=True)
        of_answer = torch.bucketize(place - shared.prompts_end, shared.answer_starts.to(device)[1:], right=True)
        answer, prompt = (place >= shared.prompts_end) & (place < shared.answers_end), place < shared.prompts_end
        seen |= (answer[:, None] & prompt) & (of_answer[:, None] == of_prompt)
    return seen


def by_mask(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of [tokens, heads, head_dim] by an explicit mask, in the precision of its inputs."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen.to(q.device), -torch.inf).softmax(-1), v)


def inputs_of(row: Microbatch, heads: tuple[int, int], dtype: torch.dtype, head_dim: int = 32) -> list[Tensor]:
    """Query, key, value and a gradient of the output."""
    draw = torch.Generator().manual_seed(1)
    sizes = (heads[0], heads[1], heads[1], heads[0])
    return [2 * torch.randn(len(row.tokens), n, head_dim, generator=draw, dtype=torch.float64).to(dtype) for n in sizes]


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients of query, key and value."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def attending(row: Microbatch, name: str, causal: bool = True):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = (causal, q.shape[-1] ** -0.5, None, name)
        return joined.attention(q, k, v, row.cu_seqlens, row.max_seqlen, row.shared, options)

    return attend


def largest_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest relative error, in the norm of a whole tensor."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def test_both_forms_see_the_same() -> None:
    rows = [row_of(MIXED, form=form) for form in FORMS]
    assert torch.equal(*map(visible, rows)) and [type(row.shared) for row in rows] == [SharedPrompts, CopiedPrompts]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (3, 1)])
def test_attention_is_exact(heads: tuple[int, int], form: str) -> None:
    row = row_of(MIXED, form=form)
    given = inputs_of(row, heads, torch.float64)
    wanted = with_gradients(lambda q, k, v: by_mask(q, k, v, visible(row)), *given)
    assert largest_error(with_gradients(attending(row, "sdpa"), *given), wanted) < 1e-13


GROUPS = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 9), min_size=1, max_size=5)), max_size=4)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30)
@given(groups=GROUPS.filter(bool))
def test_attention_of_any_row_is_exact(groups: Groups, form: str) -> None:
    """A single group, all groups of one, no whole documents, prompts and answers of one token."""
    row = row_of(groups, form=form)
    given = inputs_of(row, (2, 1), torch.float64, head_dim=8)
    wanted = with_gradients(lambda q, k, v: by_mask(q, k, v, visible(row)), *given)
    assert largest_error(with_gradients(attending(row, "sdpa"), *given), wanted) < 1e-13


@pytest.mark.parametrize("form", FORMS)
def test_attention_in_bfloat16_is_as_exact_as_without_sharing(form: str) -> None:
    errors = {}
    for share in (True, False):
        row = row_of(MIXED, share, form)
        given = inputs_of(row, (4, 2), torch.bfloat16)
        exact = [x.double() for x in given]
        wanted = with_gradients(lambda q, k, v, row=row: by_mask(q, k, v, visible(row)), *exact)
        errors[share] = largest_error(with_gradients(attending(row, "sdpa"), *given), wanted)
    assert errors[True] < 2 * errors[False] < 2e-2


def test_a_whole_piece_may_see_itself() -> None:
    """Not causal, as in an image: by the operator, and by the padded call that `sdpa` is where nothing is shared."""
    row = row_of([(5, [2]), (1, [1]), (30, [9])])
    given = inputs_of(row, (4, 2), torch.float64)
    piece = torch.bucketize(torch.arange(len(row.tokens)), row.cu_seqlens[1:], right=True)
    wanted = with_gradients(lambda q, k, v: by_mask(q, k, v, piece[:, None] == piece), *given)
    assert largest_error(with_gradients(attending(row, "sdpa", causal=False), *given), wanted) < 1e-13

    def padded(*inputs: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in inputs)
        places = {"cu_seq_lens_q": row.cu_seqlens, "max_length_q": row.max_seqlen, "is_causal": False}
        return attention.ATTENTIONS["sdpa"](None, *heads_first, None, **places)[0][0]

    assert largest_error(with_gradients(padded, *given), wanted) < 1e-13


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_torch_takes_our_arguments(causal: bool, window: int | None) -> None:
    """Its operators are private: without a GPU at least their signature and the shapes of their results are checked."""
    q, k = (torch.empty(n, heads, 64, dtype=torch.bfloat16, device="meta") for n, heads in ((9, 4), (7, 2)))
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    at = Sequences(starts, starts, 5, 4, causal, 0.125, window)
    out, lse = KERNELS["varlen"].forward(q, k, k, at)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 9), torch.float32)
    grads = KERNELS["varlen"].backward(out, q, k, k, out, lse, at)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


def scored(row: Microbatch) -> list[tuple[int, int, int, int]]:
    """For each trainable token: itself and its position, token and position of what predicts it. Sorted."""
    keys = zip(row.tokens[row.scored].tolist(), row.positions[row.scored].tolist(), strict=True)
    before = zip(row.tokens[row.predictor].tolist(), row.positions[row.predictor].tolist(), strict=True)
    return sorted((*key, *other) for key, other in zip(keys, before, strict=True))


@given(groups=GROUPS.filter(bool))
def test_a_row_trains_the_same_tokens_with_the_same_predictors(groups: Groups) -> None:
    shared, whole = row_of(groups), row_of(groups, share=False)
    assert scored(shared) == scored(whole)
    many = [(prompt, answers) for prompt, answers in groups if len(answers) > 1]
    saved = sum(prompt * (len(answers) - 1) for prompt, answers in many)
    assert len(shared.tokens) == len(whole.tokens) - saved
    assert (shared.shared is None) == (not many)


def test_layout() -> None:
    row = row_of([(2, [3, 1]), (3, [2]), (4, [1, 1])])
    assert row.cu_seqlens.tolist() == [0, 2, 6, 9, 10, 11, 12, 17]
    assert row.positions.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 2, 4, 4, 0, 1, 2, 3, 4]
    assert row.scored.tolist() == [6, 7, 8, 9, 10, 11, 15, 16]
    assert row.predictor.tolist() == [1, 6, 7, 1, 5, 5, 14, 15]
    assert row.shared is not None
    assert [x.tolist() if isinstance(x, Tensor) else x for x in row.shared] == [[0, 4, 6], [0, 2, 6], 4, 4, 6, 12]
    moved = row.to(torch.device("meta"))
    assert moved.shared.answer_starts.device.type == moved.predictor.device.type == "meta"
    assert moved.shared.prompts_end == 6


def test_layout_of_copies() -> None:
    row = row_of([(2, [1, 3]), (2, [1]), (1, [1, 1])], form="copied")
    assert row.cu_seqlens.tolist() == [0, 2, 3, 4, 7, 8, 9, 12] and row.groups == (2, 2)
    keys = [[0, 1], [2], [0, 1, 3], [0, 1, 4, 5, 6], [2, 7], [2, 8], [9, 10, 11]]
    assert isinstance(row.shared, CopiedPrompts)
    assert row.shared.keys.tolist() == [key for piece in keys for key in piece]
    assert row.shared.starts.diff().tolist() == list(map(len, keys))
    assert row.shared.longest == 5
    moved = row.to(torch.device("meta")).shared
    assert isinstance(moved, CopiedPrompts) and moved.keys.device.type == moved.starts.device.type == "meta"


def test_a_row_copies_at_most_so_many_keys_as_it_is_told() -> None:
    few, many = ([np.zeros(n)] + [np.zeros(4)] * 4 for n in (16, 17))  # 4 copies of 16 keys, in a row of 32
    found = [lay_out(texts, texts, texts, texts, range(5), [4]).copying(2.0).shared for texts in (few, many)]
    assert list(map(type, found)) == [CopiedPrompts, SharedPrompts]


def test_a_row_gathers_half_as_many_heads_of_keys_as_it_has_of_queries() -> None:
    """At most, and its own keys are among them: so where each head has keys of its own, none are copied."""
    shape = {"hidden_size": 96, "num_attention_heads": 12}
    for key_heads, most in ((2, 2.0), (3, 1.0), (12, -0.5)):
        assert attention.most_copied(Qwen2Config(**shape, num_key_value_heads=key_heads)) == pytest.approx(most)


def test_a_shared_state_s_gradient_adds_up_in_float32() -> None:
    """Sixteen answers begin at one hidden state; their gradients, added up in bfloat16, would lose digits."""
    index = torch.arange(8).repeat_interleave(16)
    grad = torch.randn(128, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    hidden = torch.zeros(8, 512, dtype=torch.bfloat16, requires_grad=True)
    _Gather.apply(hidden, index).backward(grad)
    exact = torch.zeros(8, 512, dtype=torch.float64).index_add_(0, index, grad.double())
    assert torch.equal(hidden.grad, exact.bfloat16())


@pytest.mark.parametrize("form", long_but(FORMS, 0))
def test_compiled_blocks_are_one_graph(tmp_path: Path, form: str) -> None:
    """The first row compiles each block in one piece, and later ones of its form compile nothing, whatever their
    lengths and kinds: documents at the end or none, one group or several."""
    path, name = tiny_model(tmp_path).path, attention.registered("sdpa")
    eager, compiled = (AutoModelForCausalLM.from_pretrained(path, attn_implementation=name) for _ in range(2))
    torch._dynamo.reset()
    counters.clear()
    for layer in compiled.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, backend="aot_eager")
    for groups in (MIXED[:3], [(5, [3, 2]), (9, [1] * 7)], [(4, [30, 4, 4])], MIXED):
        row, found = row_of(groups, form=form), []
        for model in (eager, compiled):
            hidden = model.model(
                input_ids=row.tokens[None], position_ids=row.positions[None], use_cache=False,
                cu_seq_lens_q=row.cu_seqlens, max_length_q=row.max_seqlen, shared_prompts=row.shared,
            ).last_hidden_state  # fmt: skip
            # attention does not depend on the keys' bias: its gradient is noise
            parameters = [x for name, x in model.model.named_parameters() if "k_proj.bias" not in name]
            found.append([hidden.detach(), *torch.autograd.grad(hidden.square().sum(), parameters)])
        assert largest_error(*found) < 1e-5
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.long
def test_a_block_has_no_more_graphs_than_the_compiler_may_keep(tmp_path: Path, mesh) -> None:
    """The most kinds of graphs: an adapter, its base, recomputed blocks, three ways to see a prompt. They are counted
    as they are captured: what makes them run would take three times as long."""
    torch._dynamo.reset()
    model = tiny_model(tmp_path).model_copy(update={"lora": LoraConfig(rank=2)})
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        policy_of(model, mesh, LEARNER.model_copy(update={"compile": True}))
        assert torch._dynamo.config.recompile_limit == MOST_GRAPHS
        policy = policy_of(model, mesh, LEARNER.model_copy(update={"activation_checkpointing": "block"}))
        for layer in policy.model.model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True, backend="eager")
        for share, most in ((False, 0.0), *((True, most) for most in FORMS.values())):
            policy.sharing.most_copied = most
            row = policy.place(row_of(MIXED, share))
            policy(row)[0].sum().backward()
            assert torch.isfinite(policy.score(row)).all() and torch.isfinite(Base(policy).score(row)).all()


NEXT = Qwen3NextConfig(num_hidden_layers=4)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Qwen2Config(), None),
        (Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=1), "layers of sliding_attention"),
        (MistralConfig(sliding_window=64), "sliding window of 64"),
        (MistralConfig(sliding_window=None), None),
        (NEXT, "layers of linear_attention, and only full attention can share a prompt"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_full_attention_shares(config: PreTrainedConfig, why: str | None) -> None:
    found = attention.why_unshared(config, "varlen", torch.device("cuda"))
    assert found is None if why is None else why in found


def test_what_cannot_share_says_so(
    tmp_path: Path, mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert policy_of(tiny_model(tmp_path), mesh).sharing.prompts
    assert not policy_of(
        tiny_model(tmp_path), mesh, LEARNER.model_copy(update={"share_prompts": False})
    ).sharing.prompts
    assert "share_prompts" not in caplog.text
    assert "on CPU only" in attention.why_unshared(Qwen2Config(), "sdpa", torch.device("cuda"))
    for why in ("why_unshared", "why_no_trees"):
        monkeypatch.setattr(attention, why, lambda *_, **__: "the model has a sliding window of 8")
    assert not policy_of(tiny_model(tmp_path), mesh).sharing.prompts
    assert "learner.share_prompts: off, every sample's prompt is computed: the model has a sliding" in caplog.text
    heads, row = torch.randn(1, 2, 12, 4), row_of([(2, [3, 3]), (1, [3])])
    places = {"cu_seq_lens_q": row.cu_seqlens, "max_length_q": row.max_seqlen, "shared_prompts": row.shared}
    with pytest.raises(ValueError, match=r"share_prompts: the model has a sliding window of 4; set it to false"):
        attention.ATTENTIONS["sdpa"](None, heads, heads, heads, None, **places, sliding_window=4)
