"""Recorded copies against `load_weights`: that of vLLM's models, before its CPU backend packs them, and others.

Then a layerwise reload of the packed models: it has to bring every weight.
"""

import importlib
import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from learner.weights.buckets import Buckets
from learner.weights.plan import Plan, Spec
from learner.weights.slices import SlicedCopy, staged_bytes
from rollout.engine.recorded_copies import RecordedCopies, joined, merged
from rollout.engine.region_copies import RegionCopies

LAYER = "model.layers.1."

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 520, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}  # fmt: skip
CASES = {
    "qwen2-tied": ("Qwen2ForCausalLM", True, 1, 0),
    "qwen2-tied-second-of-two": ("Qwen2ForCausalLM", True, 2, 1),
    "qwen2-second-of-two": ("Qwen2ForCausalLM", False, 2, 1),
    "qwen3-second-of-two": ("Qwen3ForCausalLM", True, 2, 1),
    "llama": ("LlamaForCausalLM", False, 1, 0),
}
"""Architecture, tied embeddings, tensor parallelism and the rank in it."""


def policy(specs, seed):
    """Random weights in a staging copy."""
    buckets, draw = Buckets(Plan.of(specs, 1 << 16), CPU), torch.Generator().manual_seed(seed)
    buckets.fill((name, torch.randn(shape, generator=draw).to(dtype)) for name, shape, dtype in specs)
    return buckets


def refill(buckets, specs, seed):
    """Other random weights in the same place, as the next policy."""
    buckets.fill(policy(specs, seed).views())


def zero(model):
    for parameter in model.parameters():
        parameter.data.zero_()


def state(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def expected(model, weights):
    """What `load_weights` makes of `weights`."""
    zero(model)
    with torch.no_grad():
        model.load_weights(iter(weights))
    return state(model)


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def made(request, distributed, tmp_path_factory):
    """vLLM's model, or one shard of it, and the names, shapes and dtypes that a learner publishes."""
    import vllm.distributed.parallel_state as groups
    from vllm import EngineArgs, ModelRegistry
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    architecture, tied, parallel, rank = request.param
    folder = tmp_path_factory.mktemp("model")
    kind = architecture.removesuffix("ForCausalLM").lower()
    vllm_class = getattr(importlib.import_module(f"vllm.model_executor.models.{kind}"), architecture)
    ModelRegistry.register_model(architecture, vllm_class)  # else vLLM imports itself in a process, to look at it
    config = {**SHAPE, "model_type": kind, "architectures": [architecture], "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    specs = [Spec(name, tuple(p.shape), p.dtype) for name, p in theirs.named_parameters()]
    arguments = EngineArgs(str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
                           kv_cache_memory_bytes=1 << 26, max_model_len=128)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups._TP, "world_size", parallel)
        patch.setattr(groups._TP, "rank_in_group", rank)
        vllm_config = arguments.create_engine_config()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(vllm_config):
                yield SimpleNamespace(model=initialize_model(vllm_config), specs=specs, vllm_config=vllm_config)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_repeated_copies_are_bit_equal_to_load_weights(made):
    """Also the rows that pad the vocabulary, and the slices of a shard."""
    staged, copies = policy(made.specs, 0), RecordedCopies(made.model)
    zero(made.model)
    assert isinstance(copies.load(staged.views()), set)
    assert copies.recording.problem == ""
    assert equal(state(made.model), expected(made.model, staged.views()))
    for seed in (1, 2, 3):
        refill(staged, made.specs, seed)
        assert copies.load(staged.views()) is None
        assert equal(state(made.model), expected(made.model, staged.views()))


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_copies_of_what_is_trained_leave_the_frozen_layers_alone(made):
    """A whole layer is frozen: `load_weights` has loaded it, with the first policy."""
    frozen, trained = ([s for s in made.specs if s.name.startswith(LAYER) == kind] for kind in (True, False))
    held, staged, copies = policy(frozen, 7), policy(trained, 0), RecordedCopies(made.model)
    zero(made.model)
    with torch.no_grad():
        names = made.model.load_weights(held.views())
    assert names and all(name.startswith(LAYER) for name in names)
    assert isinstance(copies.load(staged.views(), names), set) and copies.recording.problem == ""
    for seed in (1, 2):
        refill(staged, trained, seed)
        assert copies.load(staged.views(), names) is None
        ours = state(made.model)
        assert equal(ours, expected(made.model, [*held.views(), *staged.views()]))
    copies.forget()
    copies.load(staged.views())
    assert "some weights are not written" in copies.recording.problem, "without the names it is not the whole load"


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_staged_regions_are_loaded_as_load_weights_loads_whole_tensors(made):
    """The regions are found without a change to the model; one layer is frozen and comes once. A shard stages half."""
    specs = sorted(made.specs, key=lambda spec: not spec.name.startswith(LAYER))
    plan = Plan.of(specs, 1 << 16, frozen={spec.name for spec in specs if spec.name.startswith(LAYER)})
    for parameter in made.model.parameters():
        parameter.data.fill_(7.0)
    copies, before = RegionCopies(made.model), state(made.model)
    found = copies.find(specs, made.model.load_weights)
    assert not found.problem and equal(state(made.model), before)
    half = found.found[0].shape[0] < specs[0].shape[0] or found.found[0].shape[-1] < specs[0].shape[-1]
    assert not half or staged_bytes(plan, found.found) < 0.6 * plan.total_bytes
    whole, sliced = Buckets(plan, CPU), SlicedCopy(plan, CPU, found.found)
    for seed, first in ((0, 0), (1, plan.frozen), (2, plan.frozen)):
        draw = torch.Generator().manual_seed(seed)
        for _, view in whole.views(first=first):
            view.copy_(torch.randn(view.shape, generator=draw))
        for bucket in range(first, len(plan.sizes)):
            sliced.weights.buckets[bucket].copy_(whole.buckets[bucket])
            sliced.keep(bucket)
        copies.load(list(sliced.staged(first)))
        ours = state(made.model)
        assert equal(ours, expected(made.model, whole.views()))
        for name, parameter in made.model.named_parameters():
            parameter.data.copy_(ours[name])


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("made", [CASES["llama"]], indirect=True)
@pytest.mark.parametrize("plainly", [False, True], ids=["layerwise", "in place"])
@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("self_attn.k_proj.weight", "self_attn.qkv_proj"),  # a part of a layer
        ("mlp.down_proj.weight", "mlp.down_proj.weight"),
        ("input_layernorm.weight", "input_layernorm.weight"),
    ],
)
def test_a_load_that_misses_a_weight_fails(made, left_out, named, plainly):
    """In place without a staging copy, as from a folder."""
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from rollout.engine.model_load import ModelLoad

    made.vllm_config.compilation_config.static_forward_context.clear()
    model = initialize_model(made.vllm_config)
    if not plainly:
        process_weights_after_loading(model, made.vllm_config.model_config, CPU)
    load, weights = ModelLoad(model, made.vllm_config, CPU), dict(policy(made.specs, 0).views())
    load.plainly = plainly
    put_weights = load.load_trial if plainly else load.load_staged
    put_weights(iter(weights.items()))
    del weights[LAYER + left_out]
    with pytest.raises(ValueError, match=rf"^1 weights of vLLM's model were not received, {LAYER + named} among them"):
        put_weights(iter(weights.items()))


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("made", [CASES["llama"]], indirect=True)
@pytest.mark.parametrize("way", ["layerwise", "in place", "recorded", "regions"])
def test_a_weight_for_which_vllm_has_no_place_is_refused(made, way):
    """vLLM's loaders skip a bias that its model lacks."""
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from rollout.engine.model_load import ModelLoad

    made.vllm_config.compilation_config.static_forward_context.clear()
    model = initialize_model(made.vllm_config)
    if way == "layerwise":
        process_weights_after_loading(model, made.vllm_config.model_config, CPU)
    load, bias = ModelLoad(model, made.vllm_config, CPU), Spec(LAYER + "self_attn.o_proj.bias", (64,), torch.bfloat16)
    load.plainly = way != "layerwise"
    specs = [*made.specs, bias]
    words = rf"^vLLM's LlamaForCausalLM has no place for 1 weights of the learner, such as {bias.name}"
    if way == "regions":
        assert re.search(words, load.regions(specs, ()).problem)
        return
    put_weights = load.stream if way == "in place" else load.load_staged
    with pytest.raises(ValueError, match=words):
        put_weights(policy(specs, 0).views())


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("made", [CASES["llama"]], indirect=True)
def test_buckets_may_be_overwritten_while_a_loader_keeps_them(made, monkeypatch):
    """As GraniteMoE's, which has all weights before it loads the first."""
    from rollout.engine.model_load import ModelLoad

    weights, load, own = dict(policy(made.specs, 5).views()), ModelLoad(made.model, made.vllm_config, CPU), [0]
    load.plainly = True
    of_model = made.model.load_weights

    def keeping(given):
        kept = list(given)
        own[0] = len(kept)
        return of_model(iter(kept))

    def arriving():
        bucket = torch.empty(max(weight.numel() for weight in weights.values()), dtype=torch.bfloat16)
        for name, weight in weights.items():
            bucket.fill_(float("nan"))
            yield name, bucket[: weight.numel()].view(weight.shape).copy_(weight)

    monkeypatch.setattr(made.model, "load_weights", keeping)
    load.stream(arriving())
    found = state(made.model)
    monkeypatch.undo()
    assert own[0] == len(weights) and equal(found, expected(made.model, weights.items()))


class Tiny(torch.nn.Module):
    """Two matrices and a buffer, loaded by `put(parameter, tensor, model)`."""

    def __init__(self, put, dtype=torch.float32):
        super().__init__()
        self.one, self.two = (torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype)) for _ in range(2))
        self.register_buffer("seen", torch.zeros(4, 4))
        self.put, self.loads = put, 0

    def load_weights(self, weights):
        self.loads += 1
        for name, tensor in weights:
            self.put(getattr(self, name), tensor, self)
        return {"one", "two"}


def put(parameter, tensor, model):
    parameter.data.copy_(tensor)


def put_in_halves(parameter, tensor, model):
    parameter.data[:2].copy_(tensor[:2])
    parameter.data.narrow(0, 2, 2).copy_(tensor.narrow(0, 2, 2))


def put_transposed(parameter, tensor, model):
    parameter.data.copy_(tensor.t())


def put_padded(parameter, tensor, model):
    parameter.data[:3].copy_(tensor[:3])
    parameter.data[3:].fill_(0)


def put_a_clone(parameter, tensor, model):
    parameter.data.copy_(tensor.clone())


def put_a_sum(parameter, tensor, model):
    parameter.data.copy_(tensor)
    parameter.data.add_(1)


def put_half(parameter, tensor, model):
    parameter.data[:2].copy_(tensor[:2])


def put_twice(parameter, tensor, model):
    parameter.data.copy_(tensor)
    parameter.data[0].copy_(tensor[1])


def put_columns(parameter, tensor, model):
    for column in range(4):
        parameter.data[:, column].copy_(tensor[:, column])


def put_elsewhere_too(parameter, tensor, model):
    parameter.data.copy_(tensor)
    model.seen.copy_(tensor)


def put_and_derive(parameter, tensor, model):
    parameter.data.copy_(tensor)
    model.seen.copy_(parameter.data.exp())


SPECS = [Spec(name, (4, 4), torch.float32) for name in ("one", "two")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["same", "cast"])
@pytest.mark.parametrize("way", [put, put_in_halves, put_transposed, put_padded])
def test_copies_views_casts_and_padding_are_repeated(way, dtype):
    model = Tiny(way, dtype)
    staged, copies = policy(SPECS, 0), RecordedCopies(model)
    for seed in range(20):
        refill(staged, SPECS, seed)
        copies.load(staged.views())
        assert equal(state(model), expected(Tiny(way, dtype), staged.views()))
    assert model.loads == 1


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (put_a_clone, "clone"),
        (put_a_sum, "add_"),
        (put_half, "not written"),
        (put_twice, "written twice"),
        (put_columns, "contiguous"),
        (put_elsewhere_too, "copy_"),
        (put_and_derive, "exp"),
    ],
)
def test_any_other_load_is_left_to_load_weights(way, words, caplog):
    model = Tiny(way)
    staged, copies = policy(SPECS, 0), RecordedCopies(model)
    for seed in range(3):
        refill(staged, SPECS, seed)
        assert copies.load(staged.views()) == {"one", "two"}
        assert equal(state(model), expected(Tiny(way), staged.views()))
    assert model.loads == 3 and len(caplog.records) == 1 and words in caplog.text


def test_a_weight_that_is_not_sent_is_left_to_load_weights():
    model = Tiny(put)
    staged, copies = policy(SPECS[:1], 0), RecordedCopies(model)
    for _ in range(2):
        copies.load(staged.views())
    assert model.loads == 2


def test_it_records_again_where_something_moved():
    """A staging copy that was allocated anew, a parameter that was replaced, a copy that was let go."""
    model = Tiny(put)
    staged, copies = policy(SPECS, 0), RecordedCopies(model)

    def load():
        copies.load(staged.views())
        assert equal(state(model), expected(Tiny(put), staged.views()))
        return model.loads

    assert [load(), load()] == [1, 1]
    staged = policy(SPECS, 1)
    assert [load(), load()] == [2, 2]
    model.one = torch.nn.Parameter(torch.zeros(4, 4))
    assert [load(), load()] == [3, 3]
    copies.forget()
    assert [load(), load()] == [4, 4]


def test_a_worker_lets_the_old_staging_copy_go_before_it_prepares_a_new_one():
    """A recording keeps its copy in memory, so for a moment there would be two."""
    from rollout.engine.worker import WorkerExtension

    worker, copies, seen = WorkerExtension(), RecordedCopies(Tiny(put)), []
    copies.load(policy(SPECS, 0).views())
    worker.__dict__["rl_model"] = SimpleNamespace(forget_staged=copies.forget, frozen=None)
    worker.rl_staging = SimpleNamespace(prepare=lambda *_: seen.append(copies.recording), frozen=frozenset())
    assert copies.recording is not None
    worker.rl_prepare(b"", "auto")
    assert seen == [None]


def test_strided_slices_do_not_keep_the_rest_from_one_fused_copy():
    def of_shard(parameter, tensor, model):
        parameter.data.copy_(tensor if parameter is model.one else tensor.t())

    copies = RecordedCopies(Tiny(of_shard))
    copies.load(policy(SPECS, 0).views())
    assert [len(targets) for targets, _ in copies.recording.groups] == [1, 1]


def put_experts(parameter, tensor, model):
    """As vLLM: both halves of each expert, of a shard its rows of both."""
    rows = parameter.shape[1] // 2
    for half, loaded in enumerate(tensor.chunk(2, dim=1)):
        for expert, weight in enumerate(loaded.unbind()):
            parameter.data[expert].narrow(0, half * rows, rows).copy_(weight[:rows])


class Mixture(torch.nn.Module):
    """A layer of six experts, of which the worker holds `rows` of eight; loaded by `put_experts`."""

    def __init__(self, rows: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w13 = torch.nn.Parameter(torch.zeros(6, rows, 5, dtype=dtype))

    def load_weights(self, weights):
        for _, tensor in weights:
            put_experts(self.w13, tensor, self)
        return {"w13"}


EXPERTS = [Spec("w13", (6, 8, 5), torch.float32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["same", "cast"])
@pytest.mark.parametrize(("rows", "is_dense"), [(8, True), (4, False)], ids=["whole", "shard"])
def test_the_experts_of_a_layer_are_one_copy(rows, is_dense, dtype):
    model, staged = Mixture(rows, dtype), policy(EXPERTS, 0)
    copies = RecordedCopies(model)
    for seed in range(3):
        refill(staged, EXPERTS, seed)
        copies.load(staged.views())
        assert equal(state(model), expected(Mixture(rows, dtype), staged.views()))
    ((targets, sources),) = copies.recording.groups
    assert len(targets) == len(sources) == 1 and sources[0].is_contiguous() is is_dense


@pytest.mark.parametrize("rows", [8, 4])
def test_the_experts_of_a_layer_are_one_region(rows):
    model, plan = Mixture(rows), Plan.of(EXPERTS, 1 << 16)
    copies, staged = RegionCopies(model), policy(EXPERTS, 3)
    (region,) = copies.find(EXPERTS, model.load_weights).found
    sliced = SlicedCopy(plan, CPU, [region])
    sliced.weights.buckets[0].copy_(staged.buckets[0])
    sliced.keep(0)
    copies.load(list(sliced.staged()))
    assert equal(state(model), expected(Mixture(rows), staged.views()))


@pytest.mark.parametrize(
    ("places", "lengths"),
    [
        ([(0, 0), (4, 4), (8, 8)], [3]),
        ([(8, 8), (0, 0), (4, 4)], [3]),
        ([(0, 0), (4, 8), (8, 16), (12, 20)], [3, 1]),
        ([(0, 8), (4, 4), (8, 0)], [1, 1, 1]),
        ([(0, 0), (4, 0)], [1, 1]),
        ([(0, 0)], [1]),
    ],
    ids=["regular", "out of order", "two distances", "reversed", "one source twice", "one"],
)
def test_copies_at_one_distance_are_joined(places, lengths):
    """Whatever is joined, the same bytes go to the same places."""
    source, targets = torch.arange(24.0), [torch.zeros(24), torch.zeros(24)]
    for to, begin in places:
        targets[0][to : to + 4].copy_(source[begin : begin + 4])
    found = list(merged((targets[1][to : to + 4], source[begin : begin + 4]) for to, begin in places))
    for to, part in found:
        to.copy_(part)
    assert torch.equal(*targets)
    assert [len(to) if to.dim() == 2 else 1 for to, _ in found] == lengths


def test_spans_are_joined():
    assert joined([(4, 6), (0, 2), (2, 4), (9, 9), (8, 9)]) == [(0, 6), (8, 9)]
    assert joined([(0, 4), (2, 6)]) != joined([(0, 6)])
