"""What a rollout server hands to vLLM: the run file's keys, our defaults, and `rollout.engine` as it is. Imports
neither vLLM nor torch, so that `problems` costs milliseconds."""

import difflib
from collections.abc import Iterator, Mapping
from math import ceil
from operator import attrgetter
from typing import Any

from buffer.data.images import ImageFormat
from configs.checks import ENGINE_KEYS_ELSEWHERE, max_sample_tokens
from configs.flow.kv_room import CPU_KV_BYTES
from configs.flow.sequences import max_sequences, places
from configs.load import ConfigError
from configs.model_facts import facts_of, model_facts
from configs.schema import Config, ModelConfig
from configs.variables import RPC_PATH, VLLM_BYTES, gloo_here, socket_folder
from rollout.engine.door.installed import cpu_head_sizes, registered, vllm_fields
from rollout.templates.parsers import AUTO

CPU_STEP_TOKENS = 2048
HEAD = {"head_dtype": "float32"}
"""vLLM would round logits to model.dtype, and the learner's ratios would see that noise at every token."""
MIN_STEP_TOKENS, MAX_GRAPH_TOKENS = 1024, 2048
"""A GPU's step has room for twice as many tokens as sequences, and is a CUDA graph: 26,800 tokens/s of a 1.5B model on
an H200, 15,000 with vLLM's own 128 sequences and 2,048 tokens (benchmarks/LOG.md). A whole group fits once a place is
free: else each end would let one prompt into a step without a graph."""
GRAPH_KEYS = {"compilation_config", "cudagraph_capture_sizes"}
"""vLLM takes one of them only."""
LINEAR_LAYERS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
"""Layers that vLLM adapts for `model.lora.targets: all`."""
PARTS = {"qkv_proj": "q_proj", "gate_up_proj": "up_proj"}
"""A part of each layer that vLLM joins."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`; adapters of a lower rank are padded."""
USUAL_PROMPT = 128
"""Tokens of the prompts with which the price of missing graphs was measured."""
UNEQUAL_ON_CPU = ("lfm2", "lfm2_moe")
"""Small float32 copies of these are 0.01 nat off in vLLM 0.32 on a CPU, for an unknown reason."""
IMAGES_PER_STEP = 4
"""Images of the largest size that fit into a step of a GPU."""
PARSERS = {
    "tool_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""vLLM's package and table per key of `rollout.chat`."""
SIZES = ("max_num_seqs", "max_num_batched_tokens", "max_cudagraph_capture_size")
CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one process: half the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


def problems(engine: Mapping[str, Any], config: Config) -> list[str]:
    """A line for each key that the installed vLLM has no field for, and for steps that are too small."""
    lines = unknown_fields(engine, "rollout")
    tokens, most = engine.get("max_num_batched_tokens"), max_sequences(config, config.rollout.device != "cuda")
    if isinstance(tokens, int) and tokens < most:
        problem = f"rollout.engine.max_num_batched_tokens: {tokens} is less than max_num_seqs {most}"
        lines.append(
            f"{problem}, and vLLM takes a token of each sequence in a step; remove it, or set it to {2 * most}"
        )
    return lines


def unknown_fields(engine: Mapping[str, Any], section: str) -> list[str]:
    fields = set(vllm_fields()) if engine else set()
    known = {field: f"{section}.engine.{field}" for field in fields}
    ours: Any = Config.model_fields[section].annotation
    known |= {field: f"{section}.{field}" for field in ours.model_fields if field not in fields}
    lines = []
    for key in engine:
        if fields and key not in fields:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {known[close[0]]}?" if close else ""
            lines.append(f"{section}.engine.{key}: vLLM's AsyncEngineArgs has no such field{hint}")
    return lines


def unknown_parsers(config: Config) -> Iterator[str]:
    """Yield a line for each parser that the installed vLLM lacks; none without vLLM."""
    for key in PARSERS:
        if (name := getattr(config.rollout.chat, key)) not in (None, AUTO):
            yield from unknown_parser(key, name)


def unknown_parser(key: str, name: str) -> Iterator[str]:
    parsers = sorted(registered(*PARSERS[key]))
    if parsers and name not in parsers:
        close = difflib.get_close_matches(name, parsers, 1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(parsers)}"
        yield f"rollout.chat.{key}: {name!r} is no parser of the installed vLLM; {hint}"


def unserved_shapes(config: Config, cpu: bool) -> Iterator[str]:
    """Yield a line for each thing of the model that vLLM's CPU kernels lack: a server would fail or silently compute
    something else."""
    facts = facts_of(config.model)
    if cpu and facts.mutual:
        problem = "vLLM on a CPU has no token of an image see those after it, as this model does"
        yield f"model.path: {config.model.path}: {problem}; take servers with GPUs, or set model.text_alone: true"
    if cpu and facts.kind in UNEQUAL_ON_CPU:
        problem = f"vLLM on a CPU computes other log-probabilities of {facts.kind} than the learner, by 0.01 nat"
        yield f"model.path: {config.model.path}: {problem}; take another model, or servers with GPUs"
    if cpu and facts.delta_rule and config.model.dtype != "bfloat16":
        problem = f"vLLM on a CPU computes gated delta rules in bfloat16 only, and model.dtype is {config.model.dtype}"
        yield f"model.path: {config.model.path}: {problem}; set it to bfloat16, or take servers with GPUs"
    size, sizes = facts.head_size, list(cpu_head_sizes()) if cpu else []
    if size and sizes and size not in sizes:
        known = ", ".join(map(str, sizes))
        problem = f"vLLM on a CPU serves heads of size {known}, but this model's have {size}"
        yield f"model.path: {config.model.path}: {problem}; take another model, or servers with GPUs"


def cliffs(config: Config) -> Iterator[str]:
    """Yield a line for each setting that makes a GPU several times slower, with its remedy and its price: of a 1.5B
    model on an H200, measured before `plain_steps.py`."""
    given = config.rollout.engine
    if config.rollout.device == "cpu" or not all(isinstance(given.get(key, 1), int) for key in SIZES):
        return
    arguments = engine_arguments(config, 0, cpu=False)
    sequences, most = places(config), arguments["max_num_seqs"]
    tokens, graphs = arguments["max_num_batched_tokens"], largest_graph(arguments)
    prompt = min(config.data.max_prompt_tokens, tokens)
    if given.get("enforce_eager"):
        yield "rollout.engine.enforce_eager: steps run without CUDA graphs, at about half the speed; remove it"
    elif "max_num_batched_tokens" in given and tokens < sequences + prompt:
        need = f"{sequences} sequences that decode and a prompt of {prompt} need {sequences + prompt}"
        problem = f"rollout.engine.max_num_batched_tokens {tokens}: {need}; prompts are admitted piece by piece"
        yield f"{problem}, and the places of sequences that ended stay empty meanwhile; remove it"
    elif sequences > graphs:
        price = "steps with more run eagerly: 17,900 tokens/s instead of 34,700"
        problem = f"rollout.sequences {sequences} is more than the largest CUDA graph, {graphs} tokens; {price}"
        yield f"{problem}; lower it to {graphs * 7 // 8 // 16 * 16}, which leaves room for prompts"
    elif graphs < sequences + min(prompt, USUAL_PROMPT):
        price = "a step that admits a prompt runs eagerly: 22,900 tokens/s instead of 26,800"
        problem = (
            f"the largest CUDA graph has {graphs} tokens, and {sequences} sequences decode beside prompts; {price}"
        )
        yield f"{problem}; set rollout.engine.max_cudagraph_capture_size and max_num_batched_tokens to {2 * sequences}"
    elif "max_num_batched_tokens" in given and tokens > graphs:
        price = "24,800 tokens/s instead of 26,800 with 8,192 above graphs of 1,024"
        problem = f"rollout.engine.max_num_batched_tokens {tokens} is more than the largest CUDA graph, {graphs} tokens"
        yield f"{problem}: a step with many prompts runs eagerly; {price}; remove it"
    multiple = 8 if most <= 256 else 16
    if most % multiple:
        problem = f"rollout.engine.max_num_seqs {most} is no multiple of {multiple}"
        remedy = f"set it to {-(-most // multiple) * multiple}"
        yield f"{problem}: the fullest steps run in pieces instead of as one CUDA graph; {remedy}"


def largest_graph(arguments: Mapping[str, Any]) -> int:
    """Tokens of the largest step that vLLM captures as a CUDA graph."""
    inside = arguments.get("compilation_config")
    said = {**arguments, **(inside if isinstance(inside, Mapping) else {})}
    size = said.get("max_cudagraph_capture_size") or min(2 * arguments["max_num_seqs"], 512)
    return int(min(max(said.get("cudagraph_capture_sizes") or [size]), arguments["max_num_batched_tokens"]))


def on_cpu(config: Config) -> bool:
    """Whether this server runs on the CPU. Raises ConfigError if no GPU will do."""
    import torch

    if config.rollout.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["rollout.device: cuda, but torch sees no GPU; set it to cpu or auto"])
    if (quantization := config.rollout.engine.get("quantization")) and not can_fp8():
        problem = "needs a GPU that computes in FP8 (H100, L40S or newer), and vLLM sees none"
        raise ConfigError([f"rollout.engine.quantization: {quantization} {problem}; remove the key"])
    cpu = config.rollout.device == "cpu" or not torch.cuda.is_available()
    if cpu and config.rollout.routing_replay:
        problem = "needs a GPU: on a CPU vLLM returns no routes, or zeros"
        raise ConfigError([f"rollout.routing_replay: true {problem}; set it to false"])
    return cpu


def can_fp8() -> bool:
    """Ask the driver: torch would create a context in this process."""
    from rollout.engine.door.vllm_platform import current_platform

    return bool(current_platform.supports_fp8())


def environment(cpu: bool) -> dict[str, str]:
    """Return variables for vLLM; those that are set keep their value."""
    common = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}  # one server is one machine
    gloo_here(common)
    if folder := socket_folder(VLLM_BYTES):
        common[RPC_PATH] = folder
    gpu = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a fork of a process that asked for GPUs cannot use them
    return common | (CPU_ENVIRONMENT if cpu else gpu)


def engine_arguments(config: Config, seed: int, cpu: bool, form: ImageFormat | None = None) -> dict[str, Any]:
    """Merge our defaults, `rollout.engine`, and what Headrace depends on."""
    given = config.rollout.engine
    defaults: dict[str, Any] = {
        "load_format": "dummy",  # weights come from the learner
        "max_model_len": longest_sample(config),
        "generation_config": "vllm",  # the run file decides how to sample
        "enable_prefix_caching": True,
        "max_logprobs": 1,
    }
    sequences = defaults["max_num_seqs"] = max_sequences(config, cpu)
    if cpu:
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_BYTES}
        if sequences > CPU_STEP_TOKENS:
            defaults["max_num_batched_tokens"] = sequences
    else:
        image_tokens = IMAGES_PER_STEP * form.max_tokens if form else 0
        tokens = defaults["max_num_batched_tokens"] = max(2 * sequences, MIN_STEP_TOKENS, image_tokens)
        if not GRAPH_KEYS & given.keys():
            defaults["max_cudagraph_capture_size"] = min(tokens, MAX_GRAPH_TOKENS)
        if not {*SIZES, *GRAPH_KEYS} & given.keys():
            room = ceil((places(config) + config.batch.samples - 1) / 16) * 16
            defaults["max_num_seqs"] = max(sequences, room if room <= defaults["max_cudagraph_capture_size"] else 0)
    ours = {field: attrgetter(key)(config) for field, key in ENGINE_KEYS_ELSEWHERE.items()} | {
        "hf_overrides": HEAD | given.get("hf_overrides", {}),
        "seed": seed,
        "runner": "generate",  # without `architectures` in config.json vLLM would serve an embedding
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rollout.engine.worker.WorkerExtension",
        "scheduler_cls": "rollout.engine.scheduling.scheduler.scheduler",
        "disable_log_stats": True,  # `scheduler.Reports` takes their place
    }
    images = image_arguments(config, form) if form else text_arguments()
    return defaults | given | ours | images | (adapter_arguments(config.model, given) if config.model.lora else {})


def text_arguments() -> dict[str, Any]:
    """A model trained on text alone needs no tower."""
    return {"language_model_only": True} if "language_model_only" in vllm_fields() else {}


def longest_sample(config: Config) -> int:
    """Tokens of the longest sample that is trained on or evaluated."""
    answers = [each.max_tokens or 0 for each in config.data.eval.values()]
    return max([max_sample_tokens(config), *(config.data.max_prompt_tokens + answer for answer in answers)])


def adapter_arguments(model: ModelConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every request names the adapter, so graphs without one would never run; vLLM's second model runner captures them
    if asked (0.26 to 0.32)."""
    lora, known = model.lora, model_facts(model.path).linear
    assert lora is not None
    layers = list(lora.targets)
    if lora.targets == "all":  # experts are no linear layers in the learner
        layers = [name for name in LINEAR_LAYERS if not known or name in known or PARTS.get(name) in known]
    arguments = {
        "load_format": "auto",  # of the base; a run that pushes its own weights may say `dummy`
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= lora.rank),
        "lora_target_modules": list(layers),  # else vLLM wraps embedding and head too
    }
    graphs = given.get("compilation_config", {})
    if isinstance(graphs, Mapping):
        arguments["compilation_config"] = {"cudagraph_specialize_lora": False, **graphs}
    return arguments


def image_arguments(config: Config, form: ImageFormat) -> dict[str, Any]:
    """Images come decoded, resized and normalized, as the learner sees them."""
    largest = form.max_tokens * form.factor**2
    sizes: dict[str, Any] = {"size": {"shortest_edge": form.min_pixels, "longest_edge": largest}}
    if form.side is not None:
        sizes = {"size": {"height": form.side, "width": form.side}, "do_pan_and_scan": False}
    arguments = {
        "skip_tokenizer_init": False,  # vLLM does not start such a model without it
        "limit_mm_per_prompt": {"image": config.data.max_images, "video": 0},
        # vLLM finds its largest batch by images of this size
        "mm_processor_kwargs": sizes,
        "mm_processor_cache_gb": 0,  # our image names change with the weights
        "mm_device_do_normalize": False,  # `dummy` weights would leave its constants random
    }
    known = set(vllm_fields())
    # an image of which one step computes a part would not see the rest
    whole = {"disable_chunked_mm_input": True} if form.mutual else {}
    return {field: value for field, value in arguments.items() if field in known} | whole
