"""What Headrace hands to vLLM, and what it refuses."""

import dataclasses

import pytest
import torch

from configs.checks import check
from configs.load import ConfigError
from configs.schema import Config
from rollout.engine.arguments import engine_arguments, on_cpu, problems, vllm_fields

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


def test_logits_are_not_rounded_unless_the_run_file_says_so():
    assert engine_arguments(config(), 0, cpu=True)["hf_overrides"] == {"head_dtype": "float32"}
    changed = {"hf_overrides": {"head_dtype": "model", "rope_theta": 1e6}}
    assert engine_arguments(config(**changed), 0, cpu=True)["hf_overrides"] == changed["hf_overrides"]


@pytest.mark.parametrize(
    ("key", "lines"),
    [
        ("gpu_memory_utilisation", [f"{UNKNOWN}; did you mean rollout.engine.gpu_memory_utilization?"]),
        ("groups_in_flight", [f"{UNKNOWN}; did you mean rollout.groups_in_flight?"]),
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
