"""The memory estimate: the pass on meta counts what autograd keeps; descriptions, budgets and errors."""

import weakref
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.activations import ACT2FN

from buffer.data.images import Picture, SeenImage
from configs.load import ConfigError
from configs.schema import Config, ModelConfig
from learner.model import memory
from learner.model.gather_choice import choose_gather, gathers
from learner.model.loading import build_on_meta, read_config
from learner.model.memory import (
    GIB,
    Estimate,
    GpuTooSmall,
    OutOfMemory,
    PeakCandidate,
    RankRoom,
    estimate,
    explain_out_of_memory,
    least_microbatch,
    sizes_of,
)
from learner.model.microbatch import Microbatch, one_document
from learner.model.vision import PATCHES_PER_TOKEN
from learner.train.pictures import shown_row
from learner.weights.buckets import DoubleBuffer
from learner.weights.plan import Plan
from learner.weights.rows import ROW, RowPool
from tests.harness.adapters import adapted_model
from tests.harness.covered import covered
from tests.harness.pictured import form_of, seeing_model
from tests.harness.tiny_vlm import KINDS
from tests.harness.world import LEARNER, policy_of, tiny_model
from tests.learner.model.test_attention import packed
from tests.learner.model.test_families import config_of

ONCE = LEARNER.model_copy(update={"gather": "batch"})
TWO = Estimate([
    PeakCandidate({"weights": 3 * GIB, "head": 2 * GIB}, {"activations": 1 << 20}),
    PeakCandidate({"weights": 3 * GIB}, {"activations": 1 << 20, "backward pass": 1 << 20}),
])  # fmt: skip


def test_the_peak_is_the_largest_candidate() -> None:
    assert TWO.total(1024) == 6 * GIB and TWO.total(4096) == 11 * GIB
    assert TWO.describe(1024) == "6.0 GiB = 3.0 weights + 2.0 head + 1.0 activations"
    assert TWO.describe(4096).startswith("11.0 GiB = 4.0 activations + 4.0 backward pass")


@pytest.mark.parametrize("room", [5, 6, 8, 40])
def test_fit_is_the_largest_that_fits(room: int) -> None:
    tokens = TWO.fit(room * GIB)
    assert tokens % 256 == 0
    assert TWO.total(tokens) <= room * GIB < TWO.total(tokens + 256)


def kept_of(model: ModelConfig, mesh, saving: str | int) -> float:
    """Bytes a token that the forward pass of a real policy keeps: by the difference of two lengths, so that the weights
    that it gathers do not count."""
    small, large = (kept_by_autograd(model, mesh, saving, tokens) for tokens in (512, 1024))
    return (large - small) / 512


def kept_by_autograd(model: ModelConfig, mesh, saving: str | int, tokens: int) -> int:
    """Bytes that it keeps, without weights."""
    policy = policy_of(model, mesh, LEARNER.model_copy(update={"activation_checkpointing": saving}))
    seen: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    row = packed([[1] * tokens])
    decoder = policy.model.get_decoder()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.unshard()
        given = {"cu_seq_lens_q": row.cu_seqlens, "max_length_q": row.max_seqlen}
        decoder(input_ids=row.tokens[None], position_ids=row.positions[None], use_cache=False, **given)
    weights = {p.untyped_storage()._cdata for p in policy.parameters()}
    sizes = [x.untyped_storage().nbytes() for place, x in seen.items() if place not in weights]
    return sum(size for size in sizes if size >= tokens)  # what grows with tokens; the rest are gathered weights


@pytest.mark.parametrize("saving", ["none", "block", 1])
def test_activations_are_what_autograd_keeps(tmp_path: Path, mesh, saving: str | int) -> None:
    model = tiny_model(tmp_path)
    learner = LEARNER.model_copy(update={"activation_checkpointing": saving})
    ours = estimate(model, learner, 1).candidates[0].per_token["activations"] - 3 * sizes_of(model).width
    assert ours == pytest.approx(kept_of(model, mesh, saving), rel=0.25)


def pictured_row(model: ModelConfig, patches: int) -> Microbatch:
    """A row of so many patches, of one image where a model takes any size."""
    form = form_of(model)
    side = form.side or 0
    sides = (side, side) if side else (16 * form.patch, patches // 16 * form.patch)
    number = patches * form.patch**2 // prod(sides)
    pictures = [Picture(np.full((*sides, 3), colour, np.uint8), form) for colour in range(number)]
    tokens = pictures[0].num_tokens
    shown = [SeenImage(1 + at * tokens, picture) for at, picture in enumerate(pictures)]
    return shown_row([([9, *[form.image_token] * (number * tokens)], shown)])


def kept_by_tower(model: ModelConfig, mesh, saving: str | int, patches: int) -> int:
    """Bytes that the tower's forward pass keeps for so many patches."""
    policy = policy_of(model, mesh, LEARNER.model_copy(update={"activation_checkpointing": saving}))
    row, seen = policy.place(pictured_row(model, patches)), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.unshard()
        policy.sight.inputs(row.tokens, row.images)
    weights = {p.untyped_storage()._cdata for p in policy.parameters()}
    return sum(x.untyped_storage().nbytes() for place, x in seen.items() if place not in weights)


@pytest.mark.parametrize(
    ("kind", "saving", "parts"),
    covered(KINDS, ["none", "block", 1], [[], ["vision"], ["vision", "projector"]], strength=1),
)
def test_the_tower_keeps_what_autograd_keeps(
    tmp_path: Path, mesh, kind: str, saving: str | int, parts: list[str]
) -> None:
    model = seeing_model(tmp_path, kind).model_copy(update={"freeze": parts})
    learner = LEARNER.model_copy(update={"activation_checkpointing": saving})
    ours = estimate(model, learner, 1).candidates[0].per_token["tower"] / PATCHES_PER_TOKEN
    small, large = (kept_by_tower(model, mesh, saving, patches) for patches in (512, 1024))
    assert ours == pytest.approx((large - small) / 512, rel=0.25, abs=600)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pixels_of_a_microbatch_are_counted(tmp_path: Path, mesh, kind: str) -> None:
    model = seeing_model(tmp_path, kind)
    counted = estimate(model, LEARNER, 1).candidates[0].per_token["pixels"] / PATCHES_PER_TOKEN
    row = pictured_row(model, 1024)
    images = policy_of(model, mesh).place(row).images
    given = [images.pixels, *(x for x in images.layout.values() if isinstance(x, torch.Tensor))]
    assert counted == pytest.approx(sum(x.nbytes for x in given) / len(images.pixels), rel=0.02)


def test_frozen_parts_need_neither_gradients_nor_moments(tmp_path: Path) -> None:
    model = seeing_model(tmp_path, "qwen3_vl")
    free, frozen = (
        estimate(model.model_copy(update={"freeze": parts}), LEARNER, 1).candidates[0].fixed
        for parts in ([], ["vision", "projector"])
    )
    tower = sum(p.numel() for p in build_on_meta(model, memory.META_ATTENTION).model.visual.parameters())
    assert free["weights"] == frozen["weights"]
    assert free["gradients"] - frozen["gradients"] == 4 * tower and free["optimizer"] - frozen["optimizer"] == 8 * tower


def test_options_that_save_memory_lower_the_estimate(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, dtype=torch.bfloat16)
    kept, offloaded = {}, LEARNER.model_copy(update={"cpu_offload": True})
    for name in ("none", "selective", "block", 1, 2, 3):
        learner = LEARNER.model_copy(update={"activation_checkpointing": name})
        kept[name] = estimate(model, learner, 1).candidates[0].per_token["activations"]
    assert kept["none"] > kept["selective"] > kept["block"]
    assert kept["none"] > kept[1] > kept[2] == kept[3] == kept["block"]
    assert estimate(model, offloaded, 1).total(256) < estimate(model, LEARNER, 1).total(256)


def test_state_is_sharded_over_ranks(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    one, four = (estimate(model, LEARNER, world).candidates[0].fixed for world in (1, 4))
    for name in ("weights", "gradients", "optimizer"):
        assert four[name] == one[name] // 4
    (block, *_) = sizes_of(model).of_blocks
    assert four["gathered weights"] == one["gathered weights"] + 4 * block.parameters, "the last block's, gathered"
    assert estimate(model, LEARNER, 1, reference=True).candidates[0].fixed["weights"] == 2 * one["weights"]


def test_gathering_once_keeps_all_weights_and_whole_gradients(tmp_path: Path, mesh) -> None:
    """As a policy has them in the middle of a batch: weights in the model's dtype, gradients in float32."""
    for made in (tiny_model, adapted_model):
        model = made(tmp_path / made.__name__, dtype=torch.bfloat16)
        policy = policy_of(model, mesh, ONCE)
        with policy.gathering.held():
            policy.gathering.reduce_after_next(last=False)
            policy(one_document([1, 2, 3]))[0].sum().backward()
            weights = sum(p.nbytes for p in policy.parameters())
            trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        every = estimate(model, ONCE, 4).candidates
        assert max(candidate.fixed["gathered weights"] for candidate in every[1:]) == weights
        assert max(candidate.fixed["gradients"] for candidate in every) == 4 * trained
        each, once = (estimate(model, learner, 4).candidates[0] for learner in (LEARNER, ONCE))
        copied = max(0, 2 * sizes_of(model).of_blocks[-1].parameters - 4 * trained)  # before there are gradients
        assert (copied > 0) == (made is adapted_model)
        assert (once.fixed["gathered weights"], once.fixed["gradients"]) == (weights + copied, 4 * trained)
        for name in ("weights", "optimizer", "head"):
            assert each.fixed[name] == once.fixed[name]
        assert each.fixed["gradients"] == trained and each.per_token == once.per_token
        alone = estimate(model, ONCE, 1).candidates[0].fixed
        assert alone["gradients"] == 4 * trained == estimate(model, LEARNER, 1).candidates[0].fixed["gradients"]


def test_whole_gradients_are_on_the_gpu_with_offload_too(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    fixed = estimate(model, ONCE.model_copy(update={"cpu_offload": True}), 1).candidates[0].fixed
    assert fixed["weights"] == fixed["optimizer"] == 0
    assert fixed["gradients"] == estimate(model, ONCE, 1).candidates[0].fixed["gradients"] > 0


def test_gradients_that_go_to_host_memory_are_not_on_the_gpu(tmp_path: Path) -> None:
    """Where a batch is one microbatch, too."""
    model, offloaded = tiny_model(tmp_path), LEARNER.model_copy(update={"cpu_offload": True})
    for alone in (False, True):
        assert {peak.fixed["gradients"] for peak in estimate(model, offloaded, 2, alone=alone).candidates} == {0}
    kept = [peak.fixed["gradients"] for peak in estimate(model, LEARNER, 2, alone=True).candidates]
    assert max(kept) > 0


class Untraceable(torch.nn.Module):
    """An activation function whose backward pass needs real tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Unbacked.apply(x)  # type: ignore[no-untyped-call]
        return out


class _Unbacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * ctx.saved_tensors[0].sum().item()


@pytest.mark.parametrize(("way", "compiled"), [("none", False), ("block", False), ("none", True), ("block", True)])
def test_a_backward_pass_that_cannot_be_traced_is_estimated_roughly(
    tmp_path: Path, monkeypatch, caplog, way: str, compiled: bool
) -> None:
    monkeypatch.setitem(ACT2FN, "untraceable", Untraceable)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    learner, totals = LEARNER.model_copy(update={"activation_checkpointing": way, "compile": compiled}), []
    for act in ("relu", "untraceable"):
        config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, hidden_act=act)
        config.save_pretrained(tmp_path / act)
        totals.append(estimate(ModelConfig(path=str(tmp_path / act), dtype="bfloat16"), learner, 1).total(65536))
    assert 0.7 < totals[1] / totals[0] < 1.5
    [record] = [each for each in caplog.records if "cannot be traced" in each.message]
    assert "untraceable has a backward pass that cannot be traced (RuntimeError: " in record.message


def test_a_rough_estimate_tells_blocks_apart(tmp_path: Path) -> None:
    """If some blocks recompute, the others may keep much more than the mean."""
    config_of("nemotron_h").save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="bfloat16")
    for way in ("none", "block"):
        rough, traced = memory._rough_row(model, 1, way), memory._traced_row(*memory._key(model), 1, way, False)
        kept = [block.kept for block in rough.blocks]
        assert kept == pytest.approx([block.kept for block in traced.blocks], rel=0.25)
        assert (kept[0] > 2 * kept[1]) == (way == "none")
        assert rough.ends == pytest.approx(traced.ends, rel=0.25)


def test_auto_gathers_once_where_it_costs_a_tenth_at_most(tmp_path: Path, caplog) -> None:
    model = wide_model(tmp_path)
    caplog.set_level("INFO")

    def chosen(memory: int | None, tokens: int = 256, shards: int = 2, **changes) -> str | int:
        learner = LEARNER.model_copy(update={"tokens_per_microbatch": 256} | changes)
        return choose_gather(model, learner, RankRoom(shards, memory, tokens)).gather

    each, once = (estimate(model, learner, 2) for learner in (LEARNER, ONCE))
    more = once.total(256) - each.total(256)
    assert more > 0.1 * once.total(256) / memory.SHARE  # so that the tenth decides
    assert chosen(10 * more) == "batch" and chosen(10 * more - 10) == 12
    assert f"learner.gather: auto takes batch: gathers once a batch, for {more / GIB:.1f} GiB more" in caplog.text
    assert "learner.gather: auto takes 12: of 12 blocks 12 stay gathered" in caplog.text
    assert chosen(10 * more, tokens=each.fit(int(0.9 * 10 * more)) + 512) == "pass", "even this does not fit"
    assert chosen(10 * more, cpu_offload=True) == chosen(None, cpu_offload=True) == "pass"
    assert chosen(None) == "batch"
    assert chosen(10 * more, gather="pass") == "pass" and chosen(1, gather="batch") == "batch"


@pytest.mark.parametrize("activation_checkpointing", ["none", "block"])
def test_auto_microbatches_get_a_fifth_smaller_at_most(tmp_path: Path, activation_checkpointing: str) -> None:
    """At most a tenth smaller if they then have fewer than 8,192 tokens. The longest sample still fits. `auto` chooses
    the last value that leaves so much, or 0 if the share of blocks is less than twice the share of lost tokens."""
    model, keys = wide_model(tmp_path), {"activation_checkpointing": activation_checkpointing}
    learner = LEARNER.model_copy(update={"tokens_per_microbatch": "auto", **keys})
    ways = gathers(12)
    every = [estimate(model, learner.model_copy(update={"gather": gather}), 2) for gather in ways]
    seen = set[object]()
    for size in (int(factor * every[0].total(0)) for factor in (1.3, 2, 5, 40)):
        budgets = [expected.fit(int(memory.SHARE * size)) for expected in every]
        assert budgets == sorted(budgets, reverse=True)
        for sample in (0, budgets[0]):
            least = max(1, sample, 0.8 * budgets[0], min(0.9 * budgets[0], 8192))
            wanted = ["pass", *(way for way, left in zip(ways, budgets, strict=True) if left >= least)][-1]
            lost = 1 - budgets[ways.index(wanted)] / max(1, budgets[0])
            wanted = 0 if isinstance(wanted, int) and 2 * lost > wanted / 12 else wanted
            assert choose_gather(model, learner, RankRoom(2, size, sample)).gather == wanted, (size, sample, budgets)
            seen.add(wanted)
    assert "batch" in seen and len(seen) > 3


def test_auto_does_not_split_a_batch_into_many_more_microbatches(tmp_path: Path) -> None:
    """One microbatch gathers once as it is; of several there are at most a quarter more."""
    model = wide_model(tmp_path)
    learner = LEARNER.model_copy(update={"tokens_per_microbatch": "auto", "activation_checkpointing": "block"})
    sizes = estimate(model, learner.model_copy(update={"gather": "pass"}), 2)
    size = 3 * sizes.total(0)
    full = sizes.fit(int(memory.SHARE * size))

    def tokens(share: int | None, single: bool = False) -> int:
        gather = choose_gather(model, learner, RankRoom(2, size, 0), share, single).gather
        return estimate(model, learner.model_copy(update={"gather": gather}), 2).fit(int(memory.SHARE * size))

    assert tokens(None) < full and tokens(full, single=True) == full, "one microbatch"
    assert tokens(2 * full) == full, "two, not three"
    assert full > tokens(8 * full) >= 0.8 * full


def test_blocks_that_stay_gathered_take_their_weights(tmp_path: Path) -> None:
    """And what lies outside of the blocks whole gradients, where ranks share the model."""
    model = wide_model(tmp_path)
    size, width = sizes_of(model), 2

    def of(gather: str | int, shards: int = 2) -> Estimate:
        return estimate(model, LEARNER.model_copy(update={"gather": gather}), shards)

    def at_head(gather: str | int) -> int:
        return of(gather).candidates[0].fixed["gathered weights"]

    assert size.ends == size.parameters - size.blocks > 0
    assert of(0, 1).total(4096) == of("pass", 1).total(4096), "nothing is shared"
    assert of(0).total(4096) - of("pass").total(4096) == 4 * size.ends // 2
    block = size.of_blocks[0].parameters
    assert at_head(5) - at_head(3) == 2 * width * block
    assert at_head(3) - at_head("pass") == 3 * width * block, "FSDP keeps a copy of a fourth, with pass of one"
    assert at_head(13) == at_head(12) == at_head("batch") == width * size.parameters
    assert of(0).total(4096) < of(4).total(4096) < of(12).total(4096) < of("batch").total(4096)


def wide_model(folder: Path) -> ModelConfig:
    """A shape without weights, most of which is in its blocks."""
    Qwen2Config(
        vocab_size=512, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    return ModelConfig(path=str(folder))


def held_for_sending(policy) -> int:
    """Bytes of the weights in the sender's two copies; what both share counts once."""
    plan = Plan.of(policy.weight_specs(), 1 << 20, policy.frozen_names())
    sent = DoubleBuffer(plan, torch.device("cpu"))
    copies = []
    for _ in range(2):
        copies.append(sent.reserve(1.0))
        sent.offer(copies[-1])
    return sum({x.data_ptr(): x.nbytes for copy in copies for _, x in copy.weights.views()}.values())


@pytest.mark.parametrize("case", ["text", "adapter", "frozen"])
def test_rank_0_holds_the_copies_that_it_sends(tmp_path: Path, mesh, case: str) -> None:
    """Two of what is trained, one of what is frozen, and of adapters the adapter only; on the GPU with `cpu_offload`
    too."""
    made = {"text": tiny_model, "adapter": adapted_model}.get(case)
    model = made(tmp_path, dtype=torch.bfloat16) if made else seeing_model(tmp_path, "qwen3_vl")
    model = model.model_copy(update={"freeze": ["vision"] if case == "frozen" else []})
    copies = held_for_sending(policy_of(model, mesh))
    for learner in (LEARNER, LEARNER.model_copy(update={"cpu_offload": True})):
        sender, other = (estimate(model, learner, 2, sends=sends) for sends in (True, False))
        assert [peak.fixed["copies to send"] for peak in sender.candidates] == [copies] * len(sender.candidates)
        assert sender.total(256) == other.total(256) + copies


def test_ranks_that_publish_rows_hold_equal_shares_of_the_copies(tmp_path: Path, mesh) -> None:
    """What the estimate says is what two pools of each rank take, but for what aligns their rows."""
    model = tiny_model(tmp_path, dtype=torch.bfloat16)
    specs = policy_of(model, mesh).weight_specs()
    plan = Plan.of(specs, 1 << 20, (), 3)
    pools = [2 * RowPool(plan, rank, torch.device("cpu")).num_bytes for rank in range(3)]
    whole, share = (estimate(model, LEARNER, 3, sends=sends).candidates[0].fixed["copies to send"] for sends in (1, 3))
    assert share == whole // 3
    assert all(share <= pool <= share + 2 * 2 * ROW * len(specs) for pool in pools)


def test_budget_on_cpu(tmp_path: Path) -> None:
    given = {"model": tiny_model(tmp_path), "data": {"train": "x", "max_prompt_tokens": 9}, "reward": {"function": "x"}}

    def budget(tokens: int | str, answer: int) -> int:
        learner, sampling = {"tokens_per_microbatch": tokens}, {"max_tokens": answer}
        config = Config(**given, learner=learner, sampling=sampling)
        return memory.memory_budget(config, torch.device("cpu"), 1, reference=False, sends=True)[1]

    def least(tokens: int | str, answer: int, patches: int = 0) -> int:
        config = Config(**given, learner={"tokens_per_microbatch": tokens}, sampling={"max_tokens": answer})
        return least_microbatch(config, patches)

    assert (least(100, 20), least(100, 200), least("auto", 20), least("auto", 20, 99)) == (100, 209, 29, 50)
    assert budget(100, 20) == 100
    assert budget(100, 200) == 100
    assert budget("auto", 20) == 8192
    assert budget("auto", 10000) == 10009


@pytest.mark.parametrize(
    ("way", "named"), [("none", True), ("selective", True), ("block", False), (1, True), (2, False)]
)
def test_what_is_set_already_is_no_remedy(tmp_path: Path, way: str | int, named: bool) -> None:
    given = {"model": tiny_model(tmp_path), "data": {"train": "x"}, "reward": {"function": "x"}}
    config = Config(**given, learner={"activation_checkpointing": way, "gather": "pass"})
    with pytest.raises(ConfigError, match=r"tokens_per_microbatch: auto: a sample of ") as refused:
        memory.budget_in(config, 1 << 20, 1, reference=False, sends=0)
    assert (
        "set learner.activation_checkpointing: block or learner.cpu_offload, or raise" in str(refused.value)
    ) is named
    assert ("set learner.cpu_offload, or raise" in str(refused.value)) is not named


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"cpu_offload": "optimizer"}, "GiB; set learner.cpu_offload: true, or raise learner.ranks"),
        ({"cpu_offload": True}, "GiB; raise learner.ranks"),
        ({"cpu_offload": True, "gather": "batch"}, "GiB; set learner.gather: pass, or raise learner.ranks"),
        ({"tokens_per_microbatch": 90_000}, ": 90000: a microbatch of 90000 tokens takes "),
        ({"tokens_per_microbatch": 90_000}, "; lower it to as few as 2048, set learner.cpu_offload, or raise"),
        ({"tokens_per_microbatch": 2048}, "; set learner.cpu_offload, or raise"),
    ],
)
def test_the_remedy_names_keys_that_are_not_set_yet(tmp_path: Path, learner: dict[str, object], said: str) -> None:
    given = {"model": tiny_model(tmp_path), "data": {"train": "x"}, "reward": {"function": "x"}}
    config = Config(**given, learner={"activation_checkpointing": "block", "gather": "pass"} | learner)
    with pytest.raises(GpuTooSmall) as refused:
        memory.budget_in(config, 1 << 20, 1, reference=False, sends=0)
    assert said in str(refused.value)


def test_a_sample_that_fills_more_of_a_gpu_than_auto_does_is_refused_with_that_share(tmp_path: Path) -> None:
    given = {"model": tiny_model(tmp_path), "data": {"train": "x"}, "reward": {"function": "x"}}
    config = Config(**given, learner={"activation_checkpointing": "block", "gather": "pass"})
    size = memory.estimate(config.model, config.learner, 1).total(least_microbatch(config)) + GIB // 1000
    with pytest.raises(GpuTooSmall, match=rf"a GPU has [\d.]+ GiB, of which auto fills {0.9 * size / GIB:.1f}; set"):
        memory.budget_in(config, size, 1, reference=False, sends=0)


def test_copies_larger_than_a_gpu_are_refused() -> None:
    """More ranks help where each publishes its own rows."""

    def holding(gib: int) -> Estimate:
        return Estimate([PeakCandidate({"copies to send": gib << 30, "optimizer": 1 << 30}, {"activations": 1 << 20})])

    def run(**weights: str) -> Config:
        given = {"model": {"path": "m"}, "data": {"train": "x"}, "reward": {"function": "x"}, "learner": {"ranks": 2}}
        return Config.model_validate(given | {"weights": weights})

    memory.check_copies(holding(60), 80 << 30, run(publish="rows"), 2)
    with pytest.raises(ConfigError, match=r"a rank holds two copies of its rows .*, 114\.0 GiB.*raise learner\.ranks"):
        memory.check_copies(holding(114), 80 << 30, run(publish="rows"), 2)
    with pytest.raises(
        ConfigError, match=r"path: rank 0 holds two copies .*, but a GPU has 80\.0 GiB; set weights\.pub"
    ):
        memory.check_copies(holding(114), 80 << 30, run(), 2)


def test_out_of_memory_says_what_fills_it_and_what_to_change() -> None:
    with pytest.raises(OutOfMemory) as raised, explain_out_of_memory(TWO, 4096):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.13 GiB. GPU 0 has a total capacity")
    text = str(raised.value)
    assert text.startswith("the GPU is full: CUDA out of memory. A rank should take 11.0 GiB = 4.0 activations")
    assert "Lower learner.tokens_per_microbatch (4096)" in text and "\n" not in text
    assert "learner.gather: pass" in text


def test_meta_needs_no_storage(tmp_path: Path) -> None:
    assert memory.build_on_meta(tiny_model(tmp_path), memory.META_ATTENTION).device.type == "meta"


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that live at a time, of those that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for made in tree_leaves(output):
            if isinstance(made, torch.Tensor) and (storage := made.untyped_storage())._cdata not in self._alive:
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return output

    def _gone(self, address: int, num_bytes: int) -> None:
        self._alive.remove(address)
        self.now -= num_bytes


def peak_of_a_pass(model: ModelConfig, tokens: int) -> int:
    """Bytes of all tensors at a time while transformers differentiates a row and recomputes its blocks."""
    plain = AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="sdpa").train()
    plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    row = torch.ones(1, tokens, dtype=torch.int64)
    with LiveBytes() as live:
        plain.model(row, use_cache=False).last_hidden_state.sum().backward()
    return live.peak


def test_a_recomputed_block_needs_what_it_keeps_and_two_gradients(tmp_path: Path) -> None:
    """By the difference of two lengths, so that the weights do not count."""
    model = tiny_model(tmp_path)
    small, large = (peak_of_a_pass(model, tokens) for tokens in (512, 1024))
    learner = LEARNER.model_copy(update={"activation_checkpointing": "block"})
    each = max(sum(candidate.per_token.values()) for candidate in estimate(model, learner, 1).candidates)
    assert (large - small) / 512 <= each <= 1.2 * (large - small) / 512


def test_gradients_come_while_activations_go_in_a_batch_of_one_microbatch(tmp_path: Path) -> None:
    """So that the larger of both decides, not their sum; with a second microbatch it is the sum."""
    model = tiny_model(tmp_path)
    learner = LEARNER.model_copy(update={"activation_checkpointing": "block", "gather": "pass"})
    several, single = (estimate(model, learner, 1, alone=alone) for alone in (False, True))
    gradients = several.candidates[1].fixed["gradients"]
    assert single.total(1 << 20) == several.total(1 << 20) - gradients
    (_, *later) = sizes_of(model).of_blocks
    come = 4 * sum(block.trained for block in later)
    assert max(each.fixed["gradients"] for each in single.candidates[:-1]) == come, "when the first block is computed"
    assert single.candidates[-1].fixed["gradients"] == gradients, "when those outside of blocks are reduced"
    once = learner.model_copy(update={"gather": "batch"})
    assert estimate(model, once, 1, alone=True).total(1 << 20) == estimate(model, once, 1).total(1 << 20)


def test_tokens_of_images_that_see_each_other_keep_two_outputs_of_attention(tmp_path: Path) -> None:
    """And their queries once more. A text of the same model keeps one output."""
    seeing = seeing_model(tmp_path, "gemma3")
    learner = LEARNER.model_copy(update={"activation_checkpointing": "none", "compile": False})
    kept, alone = (
        estimate(model, learner, 1).candidates[0].per_token["activations"]
        for model in (seeing, seeing.model_copy(update={"text_alone": True}))
    )
    config = read_config(seeing).get_text_config()
    output = 4 * config.head_dim * config.num_attention_heads  # float32
    assert 2 * output <= (kept - alone) / len(sizes_of(seeing).of_blocks) <= 4 * output
