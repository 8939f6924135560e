"""How a policy gets into vLLM's model on one NVIDIA GPU: by recorded copies, and quantised to FP8. Random weights.

Run with `-s`: it prints the time of a load of 7B and how far a server's log-probabilities are from the learner's.
"""

import asyncio
import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.weights.shapes import COMMON, SHAPES
from configs.schema import PROBE_TOLERANCE, QUANTISED_PROBE_TOLERANCE, Config
from learner.weights.buckets import Buckets
from learner.weights.plan import Plan, Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = torch.device("cuda:0")
SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip
FP8 = ("fp8",)


def folder_of(shape, folder):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**COMMON, **shape}))
    return folder


def specs_of(folder):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return [Spec(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]


def refill(staged, seed):
    """The next policy, in place."""
    torch.manual_seed(seed)
    for _, tensor in staged.views():
        tensor.normal_(std=0.02)


def state(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def timed(work):
    """Milliseconds until the GPU has done `work`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """vLLM's process groups, of this process alone."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    torch.cuda.set_device(GPU)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('store') / 'store'}", 0, "nccl")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()


@contextmanager
def loaded(folder, **engine):
    """vLLM's model as a worker has it once started, and how policies get into it."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    from rollout.engine.model_load import ModelLoad

    arguments = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128, "load_format": "dummy"}
    vllm_config = EngineArgs(str(folder), **{**arguments, **engine}).create_engine_config()
    with set_current_vllm_config(vllm_config):
        model = get_model_loader(vllm_config.load_config).load_model(vllm_config, vllm_config.model_config)
    yield model, ModelLoad(model, vllm_config, GPU)
    del model
    torch.cuda.empty_cache()


def test_7b_by_recorded_copies_is_bit_equal_to_load_weights(distributed, tmp_path: Path, capsys) -> None:
    """After several policies; the print is the time of each."""
    folder = folder_of(SHAPES["Qwen2.5-7B"], tmp_path / "model")
    staged = Buckets(Plan.of(specs_of(folder), 1 << 30), GPU)
    with loaded(folder) as (model, load):
        times = []
        for seed in range(4):
            refill(staged, seed)
            times.append(timed(lambda: load.load_staged(staged.views())))
        assert load._copies.recording.problem == ""
        ours = state(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        with torch.no_grad():
            plain = timed(lambda: model.load_weights(staged.views()))
        assert all(torch.equal(ours[name], parameter) for name, parameter in model.named_parameters())
    with capsys.disabled():
        print(f"\n7B: recorded in {times[0]:.1f} ms, by recorded copies in {times[1:]} ms, load_weights {plain:.1f} ms")


@pytest.mark.parametrize("quantization", FP8)
def test_a_pushed_policy_is_quantised_as_one_from_a_file_is(distributed, tmp_path: Path, quantization: str) -> None:
    """Bit-equal, at the addresses that CUDA graphs hold; a policy that lacks a weight is refused."""
    from safetensors.torch import save_file

    folder = folder_of(SMALL, tmp_path / "model")
    staged = Buckets(Plan.of(specs_of(folder), 1 << 24), GPU)
    with loaded(folder, quantization=quantization) as (model, load):
        before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        for seed in (1, 2):
            refill(staged, seed)
            load.load_staged(staged.views())
        assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        pushed = state(model)
        assert any(tensor.dtype == torch.float8_e4m3fn for tensor in pushed.values())
        weights = dict(staged.views())
        del weights["model.layers.1.self_attn.k_proj.weight"]
        with pytest.raises(ValueError, match=r"^1 weights .* model\.layers\.1\.self_attn\.qkv_proj among them"):
            load.load_staged(iter(weights.items()))
    save_file({name: tensor.cpu() for name, tensor in staged.views()}, folder / "model.safetensors", {"format": "pt"})
    with loaded(folder, quantization=quantization, load_format="auto") as (model, _):
        fresh = state(model)
    assert pushed.keys() == fresh.keys()
    assert all(torch.equal(pushed[name].view(torch.uint8), fresh[name].view(torch.uint8)) for name in fresh)


def test_7b_is_quantised_between_two_steps(distributed, tmp_path: Path, capsys) -> None:
    folder = folder_of(SHAPES["Qwen2.5-7B"], tmp_path / "model")
    staged = Buckets(Plan.of(specs_of(folder), 1 << 30), GPU)
    refill(staged, 0)
    for quantization in FP8:
        with loaded(folder, quantization=quantization) as (_, load):
            times = [timed(lambda load=load: load.load_staged(staged.views())) for _ in range(3)]
        with capsys.disabled():
            print(f"\n7B, {quantization}: {times} ms")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # vLLM 0.26 leaves a ZeroMQ context open
@pytest.mark.parametrize("quantization", [None, *FP8])
def test_the_probe_passes_with_the_right_weights_only(tmp_path: Path, quantization: str | None, capsys) -> None:
    """A whole engine, under the tolerance that the run file has by default, doubled in bfloat16: a random model is the
    hardest case."""
    folder, tokens = folder_of(SMALL, tmp_path / "model"), [(7 * i) % 1000 for i in range(64)]
    scores = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        model.save_pretrained(folder / str(seed))
        with torch.no_grad():
            logits = model.float()(torch.tensor([tokens])).logits[0, :-1]
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())
    engine = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
    config = Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train": "none.parquet", "max_prompt_tokens": 100},
            "reward": {"function": "countdown"},
            "sampling": {"max_tokens": 100},
            "rollout": {"engine": engine | ({"quantization": quantization} if quantization else {})},
        }
    )
    right, wrong = asyncio.run(differences(config, [folder / "0", folder / "1"], tokens, scores))
    tolerance = QUANTISED_PROBE_TOLERANCE if quantization else 2 * PROBE_TOLERANCE
    with capsys.disabled():
        print(f"\n{quantization}: right weights {right}, wrong ones {wrong}, tolerance {tolerance} nat")
    assert max(right) <= tolerance < min(wrong)


async def differences(config, folders, tokens, scores):
    """Mean absolute differences of the probe under each policy: to its own scores, and to the other's."""
    from rollout.engine.vllm_engine import Engine

    engine, found = await Engine.start(config, seed=1), []
    try:
        for folder in folders:
            await engine.load_folder(folder)
            engine.version += 1  # the prefix cache is salted by it
            ours = await engine.probe(tokens)
            found.append([sum(abs(a - b) for a, b in zip(ours, s, strict=True)) / len(ours) for s in scores])
    finally:
        await engine.close()
    return [found[0][0], found[1][1]], [found[0][1], found[1][0]]
