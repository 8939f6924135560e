"""What a rollout server hands to vLLM: the run file's keys, defaults, and `rollout.engine` as it is, checked.

Pure; imports no vLLM: `rollout/engine/vllm_engine.py` passes in what AsyncEngineArgs knows.
"""

import ast
import difflib
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from configs.load import ConfigError
from configs.schema import Config

CPU_KV_BYTES = 256 << 20
ELSEWHERE = {
    "model": "model.path",
    "tokenizer": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "seed": "run.seed",
}
"""Engine arguments that have a key of their own in the run file."""
FIXED = ("worker_extension_cls", "logprobs_mode", "skip_tokenizer_init", "data_parallel_size", "pipeline_parallel_size")
"""Engine arguments that Headrace depends on."""
HEAD = {"head_dtype": "float32"}
"""vLLM would round logits to model.dtype; the learner does not, and its ratios would see that noise at every token."""
CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one process: half the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # vLLM's processes warn of each other's deprecations
}


def problems(engine: Mapping[str, Any], config: Config) -> list[str]:
    """A line for each key of `engine` (`rollout.engine`) that the installed vLLM has no field for; none without vLLM.

    `configs.checks` judges the keys that Headrace sets or that have a key of their own in the run file.
    """
    fields = set(vllm_fields())
    known = {field: f"rollout.engine.{field}" for field in fields}
    known |= {field: f"rollout.{field}" for field in type(config.rollout).model_fields if field not in fields}
    lines = []
    for key in engine:
        if fields and key not in fields:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {known[close[0]]}?" if close else ""
            lines.append(f"rollout.engine.{key}: vLLM's AsyncEngineArgs has no such field{hint}")
    return lines


def vllm_fields() -> Iterator[str]:
    """The fields of AsyncEngineArgs, read from the source of the installed vLLM: importing it takes ten seconds."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return
    source = Path(vllm.origin).with_name("engine") / "arg_utils.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id


def on_cpu(config: Config) -> bool:
    """Does this server run on the CPU? Raises ConfigError for a GPU that is not there."""
    if config.rollout.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["rollout.device: cuda, but torch sees no GPU; set it to cpu or auto"])
    return config.rollout.device == "cpu" or not torch.cuda.is_available()


def environment(cpu: bool) -> dict[str, str]:
    """What vLLM reads from the environment; what is set already stays."""
    common = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}  # one server is one machine
    gpu = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}  # a fork of a process that asked for GPUs cannot use them
    return common | (CPU_ENVIRONMENT if cpu else gpu)


def engine_arguments(config: Config, seed: int, fields: Collection[str]) -> dict[str, Any]:
    """Arguments for vLLM, which knows `fields`: our defaults, then `rollout.engine`, then what Headrace depends on.

    Raises ConfigError, a line for each key of `rollout.engine` that is unknown or belongs elsewhere.
    """
    given = config.rollout.engine
    problems = [problem for key in given if (problem := _problem(key, fields))]
    if problems:
        raise ConfigError(problems)
    defaults: dict[str, Any] = {
        "load_format": "dummy",  # weights come from the learner
        "max_model_len": config.data.max_prompt_tokens + config.sampling.max_tokens,
        "generation_config": "vllm",  # sampling is what the run file says, not what comes with the model
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "max_logprobs": 1,
    }
    if on_cpu(config):
        in_flight = config.rollout.groups_in_flight * config.batch.samples
        defaults |= {"enforce_eager": True, "max_num_seqs": min(in_flight + 1, 256)}
        defaults |= {"kv_cache_memory_bytes": CPU_KV_BYTES}
    ours = {
        "hf_overrides": HEAD | given.get("hf_overrides", {}),
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": config.model.dtype,
        "tensor_parallel_size": config.rollout.tensor_parallel,
        "seed": seed,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rollout.engine.worker.WorkerExtension",
    }
    return defaults | given | ours


def end_tokens(model: str, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the tokenizer's and those of the model's generation config."""
    ends = {tokenizer.eos_token_id} - {None}
    with suppress(OSError):  # many models have no generation_config.json
        more = GenerationConfig.from_pretrained(model).eos_token_id
        ends |= set(more if isinstance(more, list) else [more]) - {None}
    return sorted(ends)


def _problem(key: str, fields: Collection[str]) -> str:
    if key in ELSEWHERE:
        return f"rollout.engine.{key}: set {ELSEWHERE[key]} instead"
    if key in FIXED:
        return f"rollout.engine.{key}: Headrace sets it; remove the key"
    if key not in fields:
        close = difflib.get_close_matches(key, fields, 1)
        hint = f"; did you mean rollout.engine.{close[0]}?" if close else ""
        return f"rollout.engine.{key}: vLLM's AsyncEngineArgs has no such field{hint}"
    return ""
