"""What a rollout server hands to vLLM: the run file's keys, our defaults, and `rollout.engine` as it is.

Imports neither vLLM nor torch, so that `problems` costs milliseconds wherever a run file is checked.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from configs.checks import ENGINE_KEYS_ELSEWHERE, max_sample_tokens
from configs.load import ConfigError
from configs.schema import Config

CPU_KV_BYTES = 256 << 20
HEAD = {"head_dtype": "float32"}
"""vLLM would round logits to model.dtype. The learner does not, and its ratios would see that noise at every token."""
MIN_STEP_TOKENS, MAX_GRAPH_TOKENS = 1024, 2048
"""On a GPU a step may have twice as many tokens as sequences: all that generate, and as many tokens of prompts. Steps
of that size run as CUDA graphs. vLLM's own 128 sequences and 2,048 tokens left more than half of an H200 idle:
15,000 tokens/s of a 1.5B model, against 22,900 with 512 sequences and 26,800 with these arguments (docs/benchmarks.md).
"""
GRAPH_KEYS = {"compilation_config", "cudagraph_capture_sizes"}
"""They say which CUDA graphs are captured, and vLLM takes one word on that only."""
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
    """Whether this server runs on the CPU. Raises ConfigError if it needs a GPU and there is none."""
    import torch  # takes seconds to import

    if config.rollout.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["rollout.device: cuda, but torch sees no GPU; set it to cpu or auto"])
    return config.rollout.device == "cpu" or not torch.cuda.is_available()


def environment(cpu: bool) -> dict[str, str]:
    """Environment variables for vLLM; those that are set already stay as they are."""
    common = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}  # one server is one machine
    gpu = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a fork of a process that asked for GPUs cannot use them
    return common | (CPU_ENVIRONMENT if cpu else gpu)


def engine_arguments(config: Config, seed: int, cpu: bool) -> dict[str, Any]:
    """Arguments for AsyncEngineArgs: our defaults, then `rollout.engine`, then what Headrace depends on."""
    given = config.rollout.engine
    defaults: dict[str, Any] = {
        "load_format": "dummy",  # weights come from the learner
        "max_model_len": max_sample_tokens(config),
        "generation_config": "vllm",  # the run file decides how to sample, not the model's folder
        "enable_prefix_caching": True,
        "max_logprobs": 1,
    }
    in_flight = config.rollout.groups_in_flight * config.batch.samples
    if cpu:
        defaults |= {"enforce_eager": True, "max_num_seqs": min(in_flight + 1, 256)}
        defaults |= {"kv_cache_memory_bytes": CPU_KV_BYTES}
    else:
        sequences = given.get("max_num_seqs", -(-in_flight // 16) * 16)  # CUDA graphs are for multiples of 16
        tokens = max(2 * sequences, MIN_STEP_TOKENS)
        defaults |= {"max_num_seqs": sequences, "max_num_batched_tokens": tokens}
        if not GRAPH_KEYS & given.keys():
            defaults["max_cudagraph_capture_size"] = min(tokens, MAX_GRAPH_TOKENS)
    ours = {field: attrgetter(key)(config) for field, key in ENGINE_KEYS_ELSEWHERE.items()} | {
        "hf_overrides": HEAD | given.get("hf_overrides", {}),
        "seed": seed,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rollout.engine.worker.WorkerExtension",
        "scheduler_cls": "rollout.engine.scheduler.scheduler",
        "disable_log_stats": True,  # vLLM's own; `rollout.engine.scheduler.Reports` takes their place
    }
    return defaults | given | ours
