"""How policies that see get into vLLM's model: all at first, then what is trained; layer by layer or in place.

The model is vLLM's, without an engine; the real engine has `test_vision_push.py`.
"""

from types import SimpleNamespace

import pytest
import torch

from learner.weights.buckets import Buckets
from learner.weights.plan import Plan, Spec
from tests.harness.tiny_vlm import tiny_vlm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
CPU = torch.device("cpu")
CASES = [
    pytest.param(("qwen2_5_vl", True), id="qwen2.5-tied"),
    pytest.param(("qwen2_5_vl", False), id="qwen2.5", marks=pytest.mark.long),
    pytest.param(("qwen3_vl", True), id="qwen3-tied", marks=pytest.mark.long),
    pytest.param(("qwen3_vl", False), id="qwen3"),
]
"""Families, and whether the head is the embedding: pairs of them in the fast lane."""
MERGERS = ("model.visual.merger.", "model.visual.deepstack_merger_list.")


def vision(name):
    return name.startswith("model.visual.") and not name.startswith(MERGERS)


def projector(name):
    return name.startswith(MERGERS)


def vision_and_projector(name):
    return name.startswith("model.visual.")


def as_in_the_file(folder):
    """vLLM's model before a CPU packs its layers, as a GPU keeps it; and its config."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(str(folder), enforce_eager=True, dtype="float32", kv_cache_memory_bytes=1 << 26,
                           max_model_len=128, limit_mm_per_prompt={"image": 2, "video": 0})  # fmt: skip
    vllm_config = arguments.create_engine_config()
    with set_current_vllm_config(vllm_config):
        return initialize_model(vllm_config), vllm_config


@pytest.fixture(scope="module", params=CASES)
def made(request, distributed, tmp_path_factory):
    """vLLM's model as a worker has it, the folder it is of, and the names and shapes that a learner publishes."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    kind, tied = request.param
    folder = tmp_path_factory.mktemp("model")
    theirs = tiny_vlm(folder, kind, tied=tied)
    specs = [Spec(name, tuple(p.shape), p.dtype) for name, p in theirs.named_parameters()]
    model, vllm_config = as_in_the_file(folder)
    with set_current_vllm_config(vllm_config):
        process_weights_after_loading(model, vllm_config.model_config, CPU)
    return SimpleNamespace(model=model, folder=folder, specs=specs, vllm_config=vllm_config, kind=kind)


def load_of(made, frozen=()):
    from rollout.engine.model_load import ModelLoad

    load = ModelLoad(made.model, made.vllm_config, CPU)
    load.frozen = frozenset(frozen)
    return load


def policy(specs, frozen, version):
    """Random weights in a staging copy; what is frozen is the same at every version."""
    buckets = Buckets(Plan.of(specs, 1 << 18, frozenset(frozen)), CPU)
    draws = [torch.Generator().manual_seed(seed) for seed in (0, version)]

    def drawn(spec):
        kept = spec.name in frozen
        return torch.randn(spec.shape, generator=draws[0 if kept else 1]).to(spec.dtype)

    weights = {spec.name: drawn(spec) for spec in [slot.spec for slot in buckets.plan.slots]}
    buckets.fill((spec.name, weights[spec.name]) for spec in specs)
    return buckets


@torch.no_grad()
def behaviour(model):
    """What each layer computes, those that the CPU keeps packed too."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear"):
            width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
            rows = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
            found[f"{name}, computed"] = layer.quant_method.apply(layer, rows, None)
    return found


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("streamed", [False, True], ids=["staged", "streamed"])
@pytest.mark.parametrize("part", [vision, projector, vision_and_projector])
def test_everything_at_first_then_what_is_trained(made, part, streamed):
    frozen = {spec.name for spec in made.specs if part(spec.name)}
    load = load_of(made, frozen)
    put = load.stream if streamed else load.load_staged
    for version in (1, 2, 3):
        buckets = policy(made.specs, frozen, version)
        put(buckets.views(first=0 if version == 1 else buckets.plan.frozen))
        ours = behaviour(made.model)
        load_of(made).load_staged(buckets.views())
        assert any("computed" in name for name in ours)
        assert equal(ours, behaviour(made.model))


def test_a_server_that_has_nothing_needs_everything(made):
    """Its weights are those of `dummy`."""
    frozen = {spec.name for spec in made.specs if vision(spec.name)}
    buckets = policy(made.specs, frozen, 1)
    with pytest.raises(ValueError, match=r"weights of vLLM's model were not received, visual\.blocks\.0"):
        load_of(made, frozen).load_staged(buckets.views(first=buckets.plan.frozen))


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("model.language_model.layers.1.self_attn.q_proj.", "language_model.model.layers.1.self_attn.qkv_proj."),
        ("model.language_model.layers.0.mlp.up_proj.", "language_model.model.layers.0.mlp.gate_up_proj.weight"),
        ("model.visual.blocks.1.attn.qkv.weight", "visual.blocks.1.attn.qkv.weight"),
    ],
)
def test_a_layer_that_is_frozen_in_part_is_refused_by_name(made, part, named):
    frozen = {spec.name for spec in made.specs if spec.name.startswith(part)}
    assert frozen
    with pytest.raises(ValueError, match=rf"^{named}.*: only a part of this layer of vLLM's is frozen; .*nothing$"):
        load_of(made, frozen).load_staged(policy(made.specs, frozen, 1).views())


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("model.language_model.layers.1.self_attn.k_proj.weight", "language_model.model.layers.1.self_attn.qkv_proj"),
        ("model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("model.visual.blocks.1.attn.qkv.bias", "visual.blocks.1.attn.qkv"),
        ("model.visual.merger.", "visual.merger."),
        ("lm_head.weight", "language_model.lm_head.weight"),
    ],
)
def test_a_trained_weight_that_is_missing_is_named(made, left_out, named):
    frozen = {spec.name for spec in made.specs if spec.name.startswith("model.visual.blocks.0.")}
    load, buckets = load_of(made, frozen), policy(made.specs, frozen, 1)
    load.load_staged(buckets.views())
    trained = list(buckets.views(first=buckets.plan.frozen))
    left = [(name, tensor) for name, tensor in trained if not name.startswith(left_out)]
    if len(left) == len(trained):
        assert left_out == "lm_head.weight", "a tied head is the embedding"
        return load.load_staged(iter(left))
    with pytest.raises(ValueError, match=rf"weights of vLLM's model were not received, {named}.* among them"):
        load.load_staged(iter(left))


def test_a_folder_brings_everything_whatever_its_names_and_what_is_frozen(made):
    """transformers saves Qwen2.5-VL under its old names."""
    frozen = {spec.name for spec in made.specs if vision(spec.name)}
    load, buckets = load_of(made, frozen), policy(made.specs, frozen, 1)
    load.load_folder(made.folder)
    theirs = behaviour(made.model)
    load.load_staged(buckets.views())
    assert not equal(behaviour(made.model), theirs)
    load.load_folder(made.folder)
    assert equal(behaviour(made.model), theirs)


def test_towers_are_loaded_in_place_where_a_gpu_was_seen_to_keep_them(made):
    from rollout.engine.model_load import loads_plainly

    assert loads_plainly(made.model, made.vllm_config, torch.device("cuda")) == (made.kind == "qwen2_5_vl")
    assert not loads_plainly(made.model, made.vllm_config, CPU)


def fleeting(weights):
    """Views whose storage is overwritten when the next one comes, as buckets are."""
    for name, tensor in weights:
        passing = tensor.clone()
        yield name, passing
        passing.fill_(torch.nan)


def state(model):
    return [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize("frozen", [vision_and_projector, lambda name: False], ids=["frozen", "all"])
def test_a_tower_kept_as_it_is_in_the_file_is_loaded_by_recorded_copies(made, frozen):
    from rollout.engine.model_load import ModelLoad

    (ours, vllm_config), (theirs, _) = (as_in_the_file(made.folder) for _ in range(2))
    names = {spec.name for spec in made.specs if frozen(spec.name)}
    load, buckets = ModelLoad(ours, vllm_config, CPU), policy(made.specs, names, 1)
    load.plainly, load.frozen = True, frozenset(names)
    load.load_staged(buckets.views())
    for version in (2, 3):
        later, first = policy(made.specs, names, version), buckets.plan.frozen
        for (_, target), (_, source) in zip(buckets.views(first=first), later.views(first=first), strict=True):
            target.copy_(source)
        load.load_staged(buckets.views(first=first))
        assert load._copies.recording.problem == ""
        theirs.load_weights(later.views())
        for (name, mine), (_, other) in zip(state(ours), state(theirs), strict=True):
            assert torch.equal(mine, other), name
    last = policy(made.specs, names, 4)
    load.stream(fleeting(last.views(first=last.plan.frozen)))
    theirs.load_weights(last.views())
    for (name, mine), (_, other) in zip(state(ours), state(theirs), strict=True):
        assert torch.equal(mine, other), f"{name}, as it arrives in buckets"
