"""Adapters in vLLM's LoRA layers, whole or one of two shards: against slices that are cut here.

Then what is refused, and folders in PEFT's format. `test_adapter_engine.py` generates with them.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from learner.weights.buckets import Buckets
from learner.weights.plan import LORA_A, LORA_B, Plan, Spec
from rollout.engine.lora.adapter_folder import NUMBER

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
CPU, RANK, SLOT_RANK, BLOCK = torch.device("cpu"), 6, 8, "model.layers.{}."
HIDDEN, WIDE, HEADS, KEYS, HEAD = 64, 160, 4, 2, 16
SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": WIDE,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "head_dim": HEAD, "num_key_value_heads": KEYS,
    "vocab_size": 520, "max_position_embeddings": 512, "torch_dtype": "bfloat16", "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KEYS * HEAD, HIDDEN),
    "self_attn.v_proj": (KEYS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE),
}  # fmt: skip
"""Outputs and inputs."""
FUSED = {
    "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attn.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
}
ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")


def specs(layers=tuple(LAYERS), blocks=2, rank=RANK, dtype=torch.bfloat16):
    for block in range(blocks):
        for layer in layers:
            outputs, inputs = LAYERS.get(layer, (HIDDEN, HIDDEN))
            yield Spec(BLOCK.format(block) + layer + LORA_A, (rank, inputs), dtype)
            yield Spec(BLOCK.format(block) + layer + LORA_B, (outputs, rank), dtype)


def adapter(seed, given=None):
    draw = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=draw).to(dtype)) for name, shape, dtype in given or specs()]


def staged(weights, bucket_bytes=1 << 14):
    buckets = Buckets(Plan.of([Spec(name, tuple(t.shape), t.dtype) for name, t in weights], bucket_bytes), CPU)
    buckets.fill(iter(weights))
    return buckets


@pytest.fixture(scope="module", params=[(1, 0), (2, 0), (2, 1)], ids=["whole", "first-of-two", "second-of-two"])
def made(request, distributed, tmp_path_factory):
    """vLLM's model with LoRA layers, or one shard of it."""
    import vllm.distributed.parallel_state as groups
    from vllm import EngineArgs, ModelRegistry
    from vllm.config import set_current_vllm_config
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    parallel, rank = request.param
    folder = tmp_path_factory.mktemp("model")
    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)  # else vLLM imports itself in a process
    (folder / "config.json").write_text(json.dumps(SHAPE))
    arguments = EngineArgs(str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
                           kv_cache_memory_bytes=1 << 26, max_model_len=128, enable_lora=True, max_loras=1,
                           max_lora_rank=SLOT_RANK, lora_target_modules=[n.split(".")[1] for n in LAYERS])  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups._TP, "world_size", parallel)
        patch.setattr(groups._TP, "rank_in_group", rank)
        vllm_config = arguments.create_engine_config()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(vllm_config):
                model = initialize_model(vllm_config)
                manager = LRUCacheWorkerLoRAManager(vllm_config, CPU, model.embedding_modules)
                manager.create_lora_manager(model, vllm_config)
                yield SimpleNamespace(manager=manager, folder=folder, parallel=parallel, rank=rank)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.fixture
def load(made):
    from rollout.engine.lora.adapter_load import AdapterLoad

    manager = made.manager
    manager.remove_all_adapters()
    loader = AdapterLoad(manager, str(made.folder), CPU)
    loader.register()
    return loader


def slot(made):
    """What is in the slot, and where it lies."""
    modules = made.manager._adapter_manager.modules
    index = made.manager._adapter_manager.lora_index_to_id.index(NUMBER)
    return {
        f"{name} {part}": (buffer[index, 0].clone(), buffer.data_ptr())
        for name, layer in modules.items()
        for part, buffer in enumerate([*layer.lora_a_stacked, *layer.lora_b_stacked])
    }


def expected(made, weights):
    """The slot, of this shard's slices, padded to its rank."""
    tensors, found = dict(weights), {}

    def cut(tensor, dim):
        return tensor.chunk(made.parallel, dim)[made.rank]

    for block in range(2):
        for fused, parts in FUSED.items():
            pairs = [[tensors.get(BLOCK.format(block) + part + kind) for kind in (LORA_A, LORA_B)] for part in parts]
            for number, (part, (a, b)) in enumerate(zip(parts, pairs, strict=True)):
                outputs, inputs = LAYERS[part]
                a = torch.zeros(1, inputs) if a is None else a
                b = torch.zeros(outputs, 1) if b is None else b
                a, b = (cut(a, 1), b) if part in ROW_PARALLEL else (a, cut(b, 0))
                whole_a, whole_b = torch.zeros(SLOT_RANK, a.shape[1]), torch.zeros(b.shape[0], SLOT_RANK)
                whole_a[: a.shape[0]], whole_b[:, : b.shape[1]] = a, b
                name = BLOCK.format(block) + fused
                found[f"{name} {number}"], found[f"{name} {number + len(parts)}"] = whole_a, whole_b
    return found


def holds(made, weights):
    ours, theirs = slot(made), expected(made, weights)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name][0], theirs[name]) for name in ours)


def test_a_registered_adapter_does_nothing_until_one_is_loaded(made, load):
    assert made.manager.list_adapters() == {NUMBER} and holds(made, [])


def test_adapters_are_copied_in_place_and_sliced_for_the_shard(made, load):
    before, first = slot(made), adapter(0)
    buckets = staged(first)
    load.load_staged(buckets.views())
    assert holds(made, first) and load._copies.recording.problem == ""
    for seed in (1, 2):
        buckets.fill(iter(adapter(seed)))
        load.load_staged(buckets.views())
        assert holds(made, adapter(seed))
    assert {name: where for name, (_, where) in slot(made).items()} == {n: where for n, (_, where) in before.items()}
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(buckets.views(), adapter(2), strict=True))
    registered = made.manager._adapter_manager._registered_adapters[NUMBER]
    assert not registered.loras, "vLLM holds no view of the staging copy"


def test_later_adapters_are_repeated_copies(made, load, monkeypatch):
    buckets = staged(adapter(0))
    load.load_staged(buckets.views())
    monkeypatch.setattr(load._slot, "load_weights", None)
    buckets.fill(iter(adapter(1)))
    load.load_staged(buckets.views())
    assert holds(made, adapter(1))


def test_a_new_staging_copy_is_recorded_anew(made, load):
    load.load_staged(staged(adapter(0)).views())
    load.forget_staged()
    other = staged(adapter(1), bucket_bytes=1 << 20)
    load.load_staged(other.views())
    assert holds(made, adapter(1))
    other.fill(iter(adapter(2)))
    load.load_staged(other.views())
    assert holds(made, adapter(2))


def test_streamed_buckets_may_be_overwritten_before_all_are_there(made, load):
    def overwriting():
        buffer = torch.empty(1 << 16, dtype=torch.uint8)
        for name, tensor in adapter(3):
            view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
            yield name, view
        buffer.zero_()

    load.stream(overwriting())
    assert holds(made, adapter(3))


@pytest.mark.parametrize(
    ("layers", "blocks", "words"),
    [
        ((*LAYERS, "mlp.other"), 2, "2 layers of the adapter are none that vLLM adapts, model.layers.0.mlp.other"),
        (tuple(LAYERS), 3, "7 layers of the adapter are none that vLLM adapts, model.layers.2.mlp.down_proj"),
        (tuple(LAYERS)[1:], 2, "lacks tensors of 2 layers of model.lora.targets, model.layers.0.self_attn.q_proj"),
        (tuple(LAYERS), 1, "lacks tensors of 7 layers of model.lora.targets, model.layers.1.mlp.down_proj"),
    ],
)
def test_an_adapter_of_other_layers_is_refused_and_the_one_before_stays(made, load, layers, blocks, words):
    load.load_staged(staged(adapter(0)).views())
    load.forget_staged()
    with pytest.raises(ValueError, match=words):
        load.load_staged(staged(adapter(1, list(specs(layers, blocks)))).views())
    assert holds(made, adapter(0))


def test_half_an_adapter_and_one_of_too_high_a_rank_are_refused(made, load):
    weights = adapter(0)
    del weights[-1]
    with pytest.raises(ValueError, match=r"of 1 layers of model.lora.targets, model.layers.1.mlp.down_proj"):
        load.load_staged(staged(weights).views())
    load.forget_staged()
    with pytest.raises(ValueError, match=r"LoRA rank 9 is greater than max_lora_rank 8"):
        load.load_staged(staged(adapter(0, list(specs(rank=9)))).views())
    assert holds(made, [])


def write(folder, weights, **settings):
    folder.mkdir(exist_ok=True)
    save_file({f"base_model.model.{name}": tensor for name, tensor in weights}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(("keys", "scale"), [({"lora_alpha": 3}, 0.5), ({"r": 4, "use_rslora": True}, 3.0)])
def test_a_folder_is_loaded_with_its_scale_and_replaces_all_of_the_one_before(made, load, tmp_path, keys, scale):
    load.load_staged(staged(adapter(0)).views())
    rank = keys.get("r", RANK)
    some = adapter(5, list(specs(("self_attn.v_proj", "mlp.down_proj"), rank=rank, dtype=torch.float32)))
    load.load_folder(write(tmp_path / "some", some, **keys))
    assert holds(made, [(name, value * (scale if name.endswith(LORA_B) else 1)) for name, value in some])
    load.load_folder(made.folder)
    assert holds(made, [])
    with pytest.raises(ValueError, match=r"elsewhere: whole weights, and this engine serves adapters of .*model"):
        load.load_folder(tmp_path / "elsewhere")


def test_after_a_folder_the_next_staged_adapter_is_whole(made, load, tmp_path):
    buckets = staged(adapter(0))
    load.load_staged(buckets.views())
    load.load_folder(write(tmp_path / "other", adapter(5, list(specs(rank=8, dtype=torch.float32)))))
    buckets.fill(iter(adapter(1)))
    load.load_staged(buckets.views())
    assert holds(made, adapter(1))
