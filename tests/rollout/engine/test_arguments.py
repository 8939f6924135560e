"""What Headrace hands to vLLM, and what it refuses."""

import dataclasses
import json

import pytest
import torch

from configs.checks import check
from configs.load import ConfigError
from configs.schema import Config, EvalSet, LoraConfig
from rollout.engine.arguments import (
    ADAPTER_RANKS,
    LINEAR_LAYERS,
    can_fp8,
    cliffs,
    cpu_head_sizes,
    engine_arguments,
    on_cpu,
    problems,
    unserved_shapes,
    vllm_fields,
)
from rollout.engine.model_overrides import overridden, window_override
from rollout.errors import EngineDead
from tests.harness.tiny_experts import tiny_experts

UNKNOWN = "rollout.engine.{}: vLLM's AsyncEngineArgs has no such field"


def config(device="cpu", **keys):
    return Config.model_validate(
        {
            "model": {"path": "some/model", "dtype": "float32"},
            "data": {"train": "train.parquet", "max_prompt_tokens": 100},
            "reward": {"function": "countdown"},
            "sampling": {"max_tokens": 28},
            "rollout": {"device": device, "engine": keys},
        }
    )


def test_the_run_file_decides_and_defaults_give_way():
    arguments = engine_arguments(config(max_num_seqs=3, max_model_len=64), 5, cpu=True)
    assert arguments["model"] == "some/model" and arguments["dtype"] == "float32" and arguments["seed"] == 5
    assert (arguments["max_num_seqs"], arguments["max_model_len"]) == (3, 64)
    assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["load_format"] == "dummy"
    assert engine_arguments(config(), 0, cpu=True)["max_model_len"] == 128
    whole = config().rollout.model_copy(update={"max_sample_tokens": 200})
    assert engine_arguments(config().model_copy(update={"rollout": whole}), 0, cpu=True)["max_model_len"] == 200


def with_lora(given, **keys):
    model = given.model.model_copy(update={"lora": LoraConfig(**keys)})
    return given.model_copy(update={"model": model})


def test_an_adapter_is_served_beside_the_base_on_disk():
    arguments = engine_arguments(with_lora(config()), 0, cpu=True)
    assert arguments["enable_lora"] and arguments["max_loras"] == 1 and arguments["max_lora_rank"] == 32
    assert arguments["load_format"] == "auto", "the base is not pushed"
    assert {"q_proj", "down_proj"} < set(arguments["lora_target_modules"])
    assert not {"lm_head", "embed_tokens"} & set(arguments["lora_target_modules"])
    assert set(arguments) <= set(vllm_fields())
    some = engine_arguments(with_lora(config(), targets=["q_proj", "o_proj"]), 0, cpu=True)
    assert some["lora_target_modules"] == ["q_proj", "o_proj"]
    assert not {"enable_lora", "compilation_config"} & set(engine_arguments(config(), 0, cpu=True))


def test_all_layers_of_a_mixture_are_those_of_its_attention(tmp_path):
    experts, dense = tiny_experts(tmp_path / "a"), tiny_experts(tmp_path / "b", mlp_only_layers=[0])
    attention = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"}
    for path, layers in (experts, attention), (dense, set(LINEAR_LAYERS)):
        given = with_lora(config())
        there = given.model_copy(update={"model": given.model.model_copy(update={"path": str(path)})})
        assert set(engine_arguments(there, 0, cpu=True)["lora_target_modules"]) == layers


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (8, 8), (24, 32), (300, 320), (512, 512)])
def test_the_slot_has_the_smallest_rank_of_vllm_s_that_holds_the_adapter(rank, slot):
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert engine_arguments(with_lora(config(), rank=rank), 0, cpu=True)["max_lora_rank"] == slot
    assert get_args(MaxLoRARanks) == ADAPTER_RANKS


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({}, {"cudagraph_specialize_lora": False}),
        ({"mode": 3}, {"mode": 3, "cudagraph_specialize_lora": False}),
        ({"cudagraph_specialize_lora": True}, {"cudagraph_specialize_lora": True}),
        (2, 2),
    ],
)
def test_cuda_graphs_without_an_adapter_are_not_captured_unless_the_run_file_says_so(given, passed):
    keys = {"compilation_config": given} if given else {}
    assert engine_arguments(with_lora(config(**keys)), 0, cpu=False)["compilation_config"] == passed


@pytest.mark.parametrize(("answers", "longest"), [([], 128), ([None], 128), ([9], 128), ([9, 300, None], 400)])
def test_the_engine_holds_the_longest_answer_of_an_evaluation_set(answers: list[int | None], longest: int):
    given = config()
    sets = {f"set{number}": EvalSet(path="p", max_tokens=answer) for number, answer in enumerate(answers)}
    given = given.model_copy(update={"data": given.data.model_copy(update={"eval": sets})})
    assert engine_arguments(given, 0, cpu=True)["max_model_len"] == longest


@pytest.mark.parametrize(
    ("sequences", "keys", "sizes"),
    [
        (256, {}, (272, 1024, 1024)),
        (1020, {}, (1040, 2048, 2048)),
        (8000, {}, (8000, 16000, 2048)),
        (2048, {}, (2048, 4096, 2048)),  # no room: more would not run as a graph
        (24, {}, (32, 1024, 1024)),
        ("auto", {}, (528, 1024, 1024)),
        (256, {"max_num_seqs": 700}, (700, 1400, 1400)),
        (256, {"max_num_batched_tokens": 256}, (256, 256, 1024)),  # vLLM cuts the graphs to it
        (256, {"compilation_config": {"max_cudagraph_capture_size": 64}}, (256, 1024, None)),
    ],
)
def test_a_gpu_runs_all_sequences_and_a_group_more_in_steps_that_are_captured(sequences, keys, sizes):
    """A group has 8 samples; `max_num_seqs` is a multiple of 16, as the graphs are."""
    arguments = engine_arguments(with_sequences(sequences, **keys), 0, cpu=False)
    names = ("max_num_seqs", "max_num_batched_tokens", "max_cudagraph_capture_size")
    assert tuple(arguments.get(name) for name in names) == sizes


@pytest.mark.parametrize(("sequences", "tokens"), [(2048, None), (5000, 5008), ("auto", None)])
def test_a_step_on_a_cpu_has_a_token_for_each_sequence(sequences, tokens):
    """vLLM's own 2,048 are kept where they are enough; with fewer it would not start."""
    arguments = engine_arguments(with_sequences(sequences, "cpu"), 0, cpu=True)
    assert arguments.get("max_num_batched_tokens") == tokens


def test_a_step_with_fewer_tokens_than_sequences_is_refused():
    given = with_sequences(512, max_num_batched_tokens=256)
    (line,) = problems(given.rollout.engine, given)
    assert line.startswith("rollout.engine.max_num_batched_tokens: 256 is less than max_num_seqs 512")
    given = with_sequences(512, max_num_batched_tokens=512)
    assert problems(given.rollout.engine, given) == []


def with_sequences(sequences, device="auto", **keys):
    wanted = config(device, **keys)
    rollout = wanted.rollout.model_copy(update={"sequences": sequences})
    return wanted.model_copy(update={"rollout": rollout})


@pytest.mark.parametrize(
    ("sequences", "keys", "words"),
    [
        (1024, {"max_cudagraph_capture_size": 512}, "rollout.sequences 1024 is more than the largest CUDA graph, 512"),
        (1024, {"compilation_config": {"mode": 3}}, "17,900 tokens/s instead of 34,700; lower it to 448"),
        (8000, {}, "rollout.sequences 8000 is more than the largest CUDA graph, 2048"),
        (512, {"cudagraph_capture_sizes": [1, 512]}, "22,900 tokens/s instead of 26,800"),
        (512, {"max_num_batched_tokens": 8192}, "24,800 tokens/s instead of 26,800"),
        (512, {"max_num_batched_tokens": 560}, "512 sequences that decode and a prompt of 100 need 612"),
        ("auto", {"max_num_seqs": 500}, "max_num_seqs 500 is no multiple of 16"),
        ("auto", {"max_num_seqs": 100}, "max_num_seqs 100 is no multiple of 8"),
        ("auto", {"enforce_eager": True}, "at about half the speed; remove it"),
    ],
)
def test_a_cliff_is_named_with_its_price(sequences, keys, words):
    """`config` has prompts of up to 100 tokens."""
    (line,) = cliffs(with_sequences(sequences, **keys))
    assert words in line
    assert not list(cliffs(with_sequences(sequences, "cpu", **keys)))


@pytest.mark.parametrize("sequences", ["auto", 5, 77, 512, 1024, 1500])
def test_what_headrace_chooses_is_no_cliff(sequences):
    assert list(cliffs(with_sequences(sequences))) == []
    assert list(cliffs(with_sequences(sequences, max_num_seqs="many"))) == []  # vLLM refuses it


def test_logits_are_not_rounded_unless_the_run_file_says_so():
    assert engine_arguments(config(), 0, cpu=True)["hf_overrides"] == {"head_dtype": "float32"}
    changed = {"hf_overrides": {"head_dtype": "model", "rope_theta": 1e6}}
    assert engine_arguments(config(**changed), 0, cpu=True)["hf_overrides"] == changed["hf_overrides"]


@pytest.mark.parametrize(
    ("key", "lines"),
    [
        ("gpu_memory_utilisation", [f"{UNKNOWN}; did you mean rollout.engine.gpu_memory_utilization?"]),
        ("sequence", [f"{UNKNOWN}; did you mean rollout.sequences?"]),
        ("zzz", [UNKNOWN]),
        ("max_num_seqs", []),
        ("hf_overrides", []),
    ],
)
def test_a_key_that_vllm_has_no_field_for_is_a_problem(key, lines):
    given = config(**{key: 1})
    assert problems(given.rollout.engine, given) == [line.format(key) for line in lines]


def test_keys_with_a_place_of_their_own_are_refused_unless_they_agree():
    for key, value in {"dtype": "float16", "seed": 3, "logprobs_mode": "raw_logprobs"}.items():
        with pytest.raises(ConfigError, match=rf"rollout\.engine\.{key}: "):
            check(config(**{key: value}), files=())
    same = config(dtype="float32", seed=0, model="some/model")
    check(same, files=())
    assert problems(same.rollout.engine, same) == []
    assert engine_arguments(same, 5, cpu=True)["seed"] == 5


@pytest.mark.vllm
def test_the_fields_are_those_of_vllm():
    from vllm import AsyncEngineArgs

    assert set(vllm_fields()) == {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_a_gpu_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        assert not on_cpu(config("cuda"))
    else:
        with pytest.raises(ConfigError, match=r"rollout\.device: cuda, but torch sees no GPU"):
            on_cpu(config("cuda"))
    assert on_cpu(config("cpu"))


@pytest.mark.vllm
def test_fp8_without_a_gpu_that_computes_in_it_is_refused():
    if can_fp8():
        assert not on_cpu(config("auto", quantization="fp8"))
    else:
        with pytest.raises(ConfigError, match=r"rollout\.engine\.quantization: fp8 needs a GPU"):
            on_cpu(config("auto", quantization="fp8"))


def of_model(folder):
    """Make a run of the model in `folder`."""
    run = config()
    return run.model_copy(update={"model": run.model.model_copy(update={"path": str(folder)})})


def test_head_sizes_for_cpu_are_read_from_the_source_of_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(cpu_head_sizes()) == CPUAttentionBackend.get_supported_head_sizes() and 64 in cpu_head_sizes()


@pytest.mark.parametrize(
    ("shape", "size"),
    [({"hidden_size": 96, "num_attention_heads": 2}, 48), ({"hidden_size": 64, "head_dim": 16}, 16)],
)
def test_heads_of_another_size_are_refused_before_a_server_starts(tmp_path, shape, size):
    """Each start would fail, after a minute or more."""
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4} | shape))
    run = of_model(tmp_path)
    (line,) = unserved_shapes(run, cpu=True)
    assert line.startswith(f"model.path: {tmp_path}: vLLM on a CPU serves heads of size 32, 64, ")
    assert line.endswith(f"but this model's have {size}; take another model, or servers with GPUs")
    assert not list(unserved_shapes(run, cpu=False))


def test_delta_rules_in_float32_are_refused_before_a_server_on_a_cpu_starts(tmp_path):
    """vLLM's kernel asserts bfloat16, and the server would die at its first step."""
    text = {"model_type": "qwen3_5_text", "linear_num_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    run = of_model(tmp_path)
    (line,) = unserved_shapes(run, cpu=True)
    assert line.endswith("in bfloat16 only, and model.dtype is float32; set it to bfloat16, or take servers with GPUs")
    half = run.model_copy(update={"model": run.model.model_copy(update={"dtype": "bfloat16"})})
    assert not list(unserved_shapes(run, cpu=False)) and not list(unserved_shapes(half, cpu=True))


def test_images_whose_tokens_see_later_ones_are_refused_before_a_server_on_a_cpu_starts(tmp_path):
    """vLLM computes them causally there and warns of nothing."""
    given = {"model_type": "gemma3", "vision_config": {"image_size": 896}, "text_config": {}, "image_token_index": 7}
    (tmp_path / "config.json").write_text(json.dumps(given))
    run = of_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (line,) = unserved_shapes(run, cpu=True)
    assert line.startswith(f"model.path: {tmp_path}: vLLM on a CPU has no token of an image see those after it")
    assert line.endswith("as this model does; take servers with GPUs, or set model.text_alone: true")
    alone = run.model_copy(update={"model": run.model.model_copy(update={"text_alone": True})})
    assert not list(unserved_shapes(run, cpu=False)) and not list(unserved_shapes(alone, cpu=True))


@pytest.mark.parametrize(
    "text", [{"model_type": "lfm2"}, {"model_type": "lfm2_vl", "text_config": {"model_type": "lfm2"}}]
)
def test_a_model_that_vllm_computes_otherwise_on_a_cpu_is_refused_there(tmp_path, text):
    (tmp_path / "config.json").write_text(json.dumps(text))
    (line,) = unserved_shapes(of_model(tmp_path), cpu=True)
    assert "computes other log-probabilities of lfm2 than the learner, by 0.01 nat; take another model" in line
    assert not list(unserved_shapes(of_model(tmp_path), cpu=False))


def test_servers_build_no_tower_for_a_model_that_is_trained_on_text_alone():
    assert engine_arguments(config(), 0, cpu=True)["language_model_only"] is True
    with pytest.raises(ConfigError, match=r"rollout.engine.language_model_only: Headrace sets it; remove the key"):
        check(config(language_model_only=False), files=())


def test_vllm_generates_whatever_architectures_the_config_names():
    """Without a name, or with a base model first, vLLM 0.32 served an embedding, which has no head."""
    assert engine_arguments(config(), 0, cpu=True)["runner"] == "generate"
    with pytest.raises(ConfigError, match=r"rollout.engine.runner: Headrace sets it; remove the key"):
        check(config(runner="pooling"), files=())


async def stopped():
    raise EngineDead


async def test_a_server_of_cohere_sees_as_many_tokens_as_the_learner(tmp_path, monkeypatch):
    """vLLM 0.32 adds one to the window: log-probabilities of longer samples were 0.06 nat off."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere2", "sliding_window": 512}))
    from rollout.engine.vllm_engine import Engine  # imports vLLM, which takes seconds

    given = []
    monkeypatch.setattr(Engine, "launch", lambda arguments: given.append(arguments) or stopped())
    with pytest.raises(EngineDead):
        await Engine.start(of_model(tmp_path), 0)
    assert given[0]["hf_overrides"] == {"head_dtype": "float32", "sliding_window": 511}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere2"}))
    assert window_override(str(tmp_path)) == {"sliding_window": 4095}


@pytest.mark.parametrize(("kind", "window"), [("cohere2", None), ("gemma3_text", 512), ("qwen2", 64)])
def test_other_windows_are_left_as_they_are(tmp_path, kind, window):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "sliding_window": window}))
    assert window_override(str(tmp_path)) == {}


ROPE = {"rope_type": "yarn", "llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 64}
SCALE = {"llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.2}}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"model_type": "ministral3", "rope_parameters": ROPE}, SCALE),
        ({"model_type": "mistral3", "text_config": {"model_type": "ministral3", "rope_parameters": ROPE}}, SCALE),
        (
            {"model_type": "ministral3"},
            {"llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1}},
        ),
        ({"model_type": "ministral3", "rope_parameters": {"rope_type": "yarn"}}, {}),
        ({"model_type": "mistral", "rope_parameters": ROPE}, {}),
    ],
    ids=["alone", "nested", "by default", "without", "of another type"],
)
def test_a_server_of_ministral_scales_late_queries_as_the_learner_does(tmp_path, given, wanted):
    """vLLM 0.32 reads the factor under another key: log-probabilities of late tokens were 0.6 nat off."""
    (tmp_path / "config.json").write_text(json.dumps(given))
    nested = {"text_config": {"rope_theta": 1e6, **wanted}} if "text_config" in given else wanted
    changed = {"head_dtype": "model", **({"text_config": {"rope_theta": 1e6}} if "text_config" in given else {})}
    assert overridden(str(tmp_path), changed) == {"head_dtype": "model", **nested}


def test_supported_heads_and_models_of_the_hub_are_accepted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, "hidden_size": 128}))
    assert not list(unserved_shapes(config(), cpu=True)), "the heads of a model on the hub are unknown"
    assert not list(unserved_shapes(of_model(tmp_path), cpu=True))
