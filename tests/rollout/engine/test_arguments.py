"""What Headrace hands to vLLM, and what it refuses to."""

import pytest
import torch

from configs.load import ConfigError
from configs.schema import Config
from rollout.engine.arguments import engine_arguments, on_cpu

FIELDS = {"hf_overrides", "gpu_memory_utilization", "max_num_seqs", "max_model_len", "dtype", "logprobs_mode"}


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
    arguments = engine_arguments(config(max_num_seqs=3, max_model_len=64), 5, FIELDS)
    assert arguments["model"] == "some/model" and arguments["dtype"] == "float32" and arguments["seed"] == 5
    assert (arguments["max_num_seqs"], arguments["max_model_len"]) == (3, 64)
    assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["load_format"] == "dummy"
    assert engine_arguments(config(), 0, FIELDS)["max_model_len"] == 128


def test_logits_are_not_rounded_unless_the_run_file_says_so():
    assert engine_arguments(config(), 0, FIELDS)["hf_overrides"] == {"head_dtype": "float32"}
    changed = {"hf_overrides": {"head_dtype": "model", "rope_theta": 1e6}}
    assert engine_arguments(config(**changed), 0, FIELDS)["hf_overrides"] == changed["hf_overrides"]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (
            "gpu_memory_utilisation",
            r"rollout\.engine\.gpu_memory_utilisation: .*did you mean rollout\.engine\.gpu_memory_u",
        ),
        ("zzz", r"rollout\.engine\.zzz: vLLM's AsyncEngineArgs has no such field$"),
        ("dtype", r"rollout\.engine\.dtype: set model\.dtype instead"),
        ("logprobs_mode", r"rollout\.engine\.logprobs_mode: Headrace sets it"),
    ],
)
def test_other_keys_are_refused_in_a_line_each(key, text):
    with pytest.raises(ConfigError, match=text) as error:
        engine_arguments(config(**{key: 1}), 0, FIELDS)
    assert "\n" not in str(error.value)


def test_a_gpu_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        assert not on_cpu(config("cuda"))
    else:
        with pytest.raises(ConfigError, match=r"rollout\.device: cuda, but torch sees no GPU"):
            on_cpu(config("cuda"))
    assert on_cpu(config("cpu"))
