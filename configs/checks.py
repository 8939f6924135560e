"""Refuses a run file whose keys contradict each other or the machine, before any process starts.

A rule yields lines: the key and the other key with their values, and the remedy. No package judges the run file a
second time, except where torch, a GPU, the model or vLLM is needed to know.
"""

import ast
import importlib.util
import json
import os
import shutil
import stat
import symtable
from collections.abc import Collection, Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import decode_source
from operator import attrgetter
from pathlib import Path

from configs import context_parallel, critic, matmul, offloading, publishing, sft, staging, teachers, variables
from configs.architecture import architectures, scores
from configs.data.sources import GENERATED, INSTALL, problems_with, source_name
from configs.expert_models import OTHER_MIXTURE, REPLAYED, failing, is_proven
from configs.load import ConfigError
from configs.model_facts import ModelFacts, facts_of, model_facts
from configs.model_folder import faults
from configs.own_packages import shadows
from configs.schema import NO_REWARD, Config

OWN_RAY = "local"
TOKEN_BYTES = 13
"""int32 token, uint8 sampled, float32 log-probability, int32 version."""
TEACHER_BYTES = 4
TOP_BYTES = 8
"""Per sampled token for each of `teacher.top_k`: int32 token and float32 log-probability."""

WEIGHTS = "model.path: weights"
"""A server does not read the weights if whole policies are pushed to it."""
FILES = (
    WEIGHTS,
    *("model.path", "data.train", "data.eval", "data.chat_template", "data.format_prompt", "data.image_dir"),
    *("data.demonstrations", "algorithm.loss", "algorithm.advantage"),
    *("reward.function", "reward.model", "teacher.model"),
    *("rollout.task", "rollout.agent.command", "rollout.environment.python"),
    *("run.folder", "log.trackers"),
)
"""Keys that name something on this machine. Each process checks those that it needs."""
SFT_FILES = (
    WEIGHTS,
    *("model.path", "data.train", "data.eval", "data.chat_template", "data.format_prompt", "data.image_dir"),
    *("run.folder", "log.trackers"),
)

REWARDS = (
    *("countdown", "math", "math_verify", "exact_match", "regex", "length", "judge", "reward_model"),
    *("reasoning_gym", "task"),
)
BUILT_IN = {"reward.function": REWARDS, "rollout.task": ("single_turn", "agent", "environment")}
"""`rollout` has these, which this package may not import."""
DEFINING = {"__getattr__", "exec", "globals", "setattr", "vars"}
"""With these a file may define functions that its text does not show."""

TEMPLATE_WORDS = ("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "tokenize")

TURN_ADVANTAGES = ("group_mean", "leave_one_out")

ENGINE_KEYS_ELSEWHERE = {
    "model": "model.path",
    "tokenizer": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "enable_return_routed_experts": "rollout.routing_replay",
    "seed": "run.seed",
}
"""An equal value passes, another one is refused."""

ENGINE_KEYS_SET = (
    *("worker_extension_cls", "logprobs_mode", "skip_tokenizer_init", "data_parallel_size"),
    *("pipeline_parallel_size", "scheduler_cls", "disable_log_stats", "kv_transfer_config", "limit_mm_per_prompt"),
    "runner",
    *(
        "mm_processor_kwargs",
        "mm_processor_cache_gb",
        "mm_device_do_normalize",
        "disable_chunked_mm_input",
        "language_model_only",
    ),
)
"""Headrace sets these itself, or uses their place."""

LORA_ENGINE_KEYS = (
    *("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules", "lora_dtype", "default_mm_loras"),
    "load_format",
)

REWARD_KEYS = {"model", "runner", "host", "port", "middleware", "worker_extension_cls"}

EXPERT_KERNELS = ("auto", "triton")
SPREAD = ("enable_expert_parallel", "enable_eplb")
NEVER_REPLAYED = ("decode_context_parallel_size", "prefill_context_parallel_size")

PROBE_LEAST = 3
"""The probe's text has all tokens of the longest sample but one, and its first token has no log-probability."""
QUANTIZATIONS = ("fp8", "fp8_per_tensor")
"""vLLM computes these anew for each policy."""


def check(
    config: Config, *, problems: int | None = None, files: Collection[str] = FILES, further: Iterable[str] = ()
) -> None:
    """Raise ConfigError with every contradiction. `problems`: rows of data.train. `files`: keys whose files must be on
    this machine."""
    refuse_sft(config)
    refuse_paths(config)
    found = [
        *_architecture(config), *_lengths(config), *_images(config), *_batch(config), *_algorithm(config),
        *critic.rules(config), *_devices(config), *_engine(config),
        *_addresses(config), *_sizes(config), *_epochs(config, problems), *_evaluation(config), *_files(config, files),
        *_functions(config, files), *_rewards(config), *_chat(config), *_agents(config, files),
        *publishing.contradictions(config), *staging.contradictions(config), *context_parallel.contradictions(config),
        *sft.beside(config), *matmul.contradictions(config), *offloading.contradictions(config), *_nodes(config),
        *_trackers(config, files), *_lora(config), *teachers.rules(config, max_sample_tokens(config)),
        *_variables(config), *_shadows(config), *further,
    ]  # fmt: skip
    if found:
        raise ConfigError(found)


def refuse_sft(config: Config) -> None:
    """Raise ConfigError for a run file of supervised fine-tuning."""
    if config.sft.rows is not None:
        remedy = "run it with python -m learner sft, or remove the section sft"
        raise ConfigError([f"sft.rows: {config.sft.rows}: the run file describes supervised fine-tuning; {remedy}"])


def refuse_paths(config: Config) -> None:
    """Raise ConfigError for paths that the system cannot look at: later rules need an answer."""
    lines = [f"{key}: {line}" for key, path in _paths(config) if path and (line := _unusable(path))]
    if lines := lines or [*_no_folder(config)]:
        raise ConfigError(lines)


def _no_folder(config: Config) -> Iterator[str]:
    run = config.run.path
    place = next((place for place in (run, *run.parents) if os.path.lexists(place)), None)
    if place and not place.is_dir():
        yield f"run.folder: {config.run.folder}: {place} is no folder; name another one"


def _paths(config: Config) -> Iterator[tuple[str, Path | str | None]]:
    data, rollout = config.data, config.rollout
    yield from (("model.path", config.model.path), ("run.folder", config.run.path), ("data.image_dir", data.image_dir))
    yield from (("data.chat_template", data.chat_template), ("data.format_prompt", data.format_prompt))
    shown = {"demonstrations": data.demonstrations.path} if data.demonstrations else {}
    for key, source in (data.sources() | shown).items():
        parts = [source] if isinstance(source, Path | str) else [part.path for part in source]
        yield from ((f"data.{key}", part) for part in parts if not str(part).startswith(GENERATED))
    yield from (("reward.function", part.function.rpartition(":")[0]) for part in config.reward.parts)
    named = {"rollout.task": rollout.task, "algorithm.loss": config.algorithm.loss}
    named["algorithm.advantage"] = config.algorithm.advantage
    yield from ((key, name.rpartition(":")[0]) for key, name in named.items())
    yield from (("reward.model", config.reward.model), ("rollout.environment.python", rollout.environment.python))
    for rows, teacher in config.teacher.teachers.items():
        yield f"{teachers.key_of(config.teacher, rows)}.model", teacher.model


def _unusable(path: Path | str) -> str:
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:  # ValueError: it holds a NUL
        return f"{path}: {getattr(error, 'strerror', None) or error}; correct the path"
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    return f"{path}: neither a file nor a folder, but a device, pipe or socket; name another"  # reading may never end


def check_sft(config: Config, *, rows: int | None = None, files: Collection[str] = SFT_FILES) -> None:
    """Raise ConfigError with everything that contradicts supervised fine-tuning."""
    refuse_paths(config)
    found = [
        *sft.rules(config, rows), *context_parallel.contradictions(config), *matmul.contradictions(config),
        *offloading.contradictions(config), *_architecture(config, served=False),
        *_images(config), *_devices(config), *_nodes(config), *_lora(config),
        *_files(config, files), *_trackers(config, files), *_chat(config), *_variables(config),
    ]  # fmt: skip
    if found:
        raise ConfigError(found)


def _variables(config: Config) -> list[str]:
    """The nodes of a cluster have their own interfaces."""
    return variables.problems(os.environ, interfaces=not cluster_of(config), own_ray=starts_ray(config))


def _shadows(config: Config) -> Iterator[str]:
    folders = [os.curdir, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if cluster_of(config) or starts_ray(config):
        for place in shadows(folders):
            found = f"Ray ({named_by(config)}) would import {place} in place of Headrace's {place.stem}"
            yield f"cluster.address: {found}; start the run in a folder without it, and take it from PYTHONPATH"


def cluster_of(config: Config) -> str:
    """The Ray cluster of the run; "": this machine."""
    return "" if starts_ray(config) else _address(config)


def starts_ray(config: Config) -> bool:
    """Whether the launcher starts a Ray here."""
    return _address(config) == OWN_RAY


def named_by(config: Config) -> str:
    """The key or variable of `cluster_of`."""
    return "cluster.address" if config.cluster.address else "RAY_ADDRESS"


def _address(config: Config) -> str:
    return config.cluster.address or os.environ.get("RAY_ADDRESS", "")


def own_hosts(config: Config) -> list[str]:
    """Hosts of the run's own processes, which are never reached through a proxy."""
    given = [config.buffer.host or "", config.weights.host, config.rollout.chat.host]
    given += [config.reward.host] if config.reward.servers else []
    given += [config.teacher.host] if config.teacher.served else []
    return [host for host in dict.fromkeys(given) if host not in ("", "*", "0.0.0.0", "::")]


def max_sample_tokens(config: Config) -> int:
    """Your own task may fill `rollout.max_sample_tokens`, or else the engine."""
    if config.sft.rows is not None:
        return sft.longest(config)
    turn, held = config.data.max_prompt_tokens + config.sampling.max_tokens, config.rollout.engine.get("max_model_len")
    fills = config.rollout.task != "single_turn" and isinstance(held, int)
    return config.rollout.max_sample_tokens or (max(held or 0, turn) if fills else turn)


def max_group_bytes(config: Config) -> int:
    """Bytes of the largest possible group, as stored and sent."""
    routes = model_facts(config.model.path).route_bytes if config.rollout.routing_replay else 0
    taught = TEACHER_BYTES + TOP_BYTES * (config.teacher.top_k or 0) if config.teacher.teachers else 0
    return config.batch.samples * _stored_tokens(config) * (TOKEN_BYTES + routes + taught)


def _stored_tokens(config: Config) -> int:
    return max(max_sample_tokens(config), config.rollout.chat.max_tokens or 0)


def max_episode_tokens(config: Config) -> int:
    """Tokens of the longest episode of a task that sends messages, over all its segments."""
    return config.rollout.chat.max_tokens or 4 * max_sample_tokens(config)


def existing(path: Path) -> Path:
    """The lowest folder at or above `path` that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def _architecture(config: Config, served: bool = True) -> Iterator[str]:
    path = config.model.path
    facts = model_facts(path)
    reasons = dict.fromkeys(facts.unsupported + (facts.unserved if served else ()))
    yield from (f"model.path: {path} ({facts.kind or 'unknown type'}): {reason}" for reason in reasons)


def _lengths(config: Config) -> Iterator[str]:
    prompt, answer, tokens = config.data.max_prompt_tokens, config.sampling.max_tokens, max_sample_tokens(config)
    sample = f"data.max_prompt_tokens {prompt} + sampling.max_tokens {answer} = {prompt + answer}"
    limit, budget = config.rollout.engine.get("max_model_len"), config.learner.tokens_per_microbatch
    if tokens < prompt + answer:
        remedy = f"set it to {prompt + answer} or more"
        yield f"rollout.max_sample_tokens: {tokens} is less than {sample}; {remedy}, or shorten those"
    elif tokens > prompt + answer:
        sample = (
            f"rollout.{'max_sample_tokens' if config.rollout.max_sample_tokens else 'engine.max_model_len'} {tokens}"
        )
    if config.weights.probe_every and tokens < PROBE_LEAST:
        probe = f"{sample}, and the weights' probe takes texts of samples of {PROBE_LEAST} tokens or more"
        yield f"sampling.max_tokens: {answer}: {probe}; raise it, or set weights.probe_every to 0"
    remedy = f"set it to {tokens} or more"
    if isinstance(limit, int) and limit < tokens:
        yield f"rollout.engine.max_model_len: {limit} is less than {sample}; {remedy}, or shorten those"
    if isinstance(budget, int) and budget < tokens:
        yield f"learner.tokens_per_microbatch: {budget} is less than {sample}, the longest sample; {remedy}"
    positions = model_facts(config.model.path).positions
    if positions is not None and positions < tokens:
        yield f"model.path: {config.model.path} has {positions} positions, less than {sample}; shorten those"


def _images(config: Config) -> Iterator[str]:
    least, most = config.data.min_pixels, config.data.max_pixels
    if least and most and least > most:
        yield f"data.min_pixels: {least} is more than data.max_pixels {most}; lower it or raise data.max_pixels"


def _batch(config: Config) -> Iterator[str]:
    batch, shared = config.batch, config.learner.context_parallel
    samples, bound, parts = batch.groups * batch.samples, batch.max_staleness, context_parallel.parts_of(config.learner)
    if samples < parts:
        product = f"batch.groups {batch.groups} x batch.samples {batch.samples} = {samples} samples"
        ranks = f"{config.learner.ranks}{f' / learner.context_parallel {shared} = {parts}' if shared > 1 else ''}"
        problem = f"learner.ranks: {ranks} is more than {product}, a rank would get nothing"
        yield f"{problem}; raise batch.groups or lower learner.ranks"
    if batch.target_staleness is not None and batch.target_staleness > bound:
        problem = f"batch.target_staleness: {batch.target_staleness} is more than batch.max_staleness {bound}"
        yield f"{problem}; lower it to {bound} or raise the bound"


def _nodes(config: Config) -> Iterator[str]:
    learner, ranks, nodes, shard = config.learner, config.learner.ranks, config.learner.nodes, config.learner.shard
    if ranks % nodes:
        remedy = f"each has as many: set learner.ranks to {ranks // nodes * nodes + nodes}, or other nodes"
        yield f"learner.nodes: {nodes} does not divide learner.ranks {ranks}; {remedy}"
    elif shard and ranks % shard:
        yield f"learner.shard: {shard} does not divide learner.ranks {ranks}; set it to a number that does"
    elif shard and (ranks // nodes) % shard and shard % (ranks // nodes):
        copies = f"copies of the model would lie across the nodes, which have {ranks // nodes} ranks each"
        yield f"learner.shard: {shard}, so {copies}; set it to a divisor or multiple of that"
    elif shard and shard > ranks // nodes and learner.checkpoint_on == "first_node":
        problem = f"learner.checkpoint_on: first_node has {ranks // nodes} ranks, a copy of learner.shard {shard}"
        yield f"{problem} does not lie on it; set checkpoint_on: shared, or lower learner.shard"


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, aggregation, answer = config.algorithm, config.algorithm.aggregation, config.sampling.max_tokens
    if algorithm.constant_length is not None and aggregation != "constant":
        problem = f"algorithm.constant_length: {algorithm.constant_length} has no effect with algorithm.aggregation"
        yield f"{problem} {aggregation}; set algorithm.aggregation: constant or constant_length: null"
    if algorithm.loss == "gspo" and aggregation in ("prompt", "constant"):
        problem = f"algorithm.aggregation: {aggregation} has no effect with algorithm.loss gspo"
        yield f"{problem}, a mean over samples by definition; set algorithm.aggregation: sequence or another loss"
    if algorithm.turn_discount is not None and algorithm.advantage not in TURN_ADVANTAGES:
        problem = f"algorithm.turn_discount: {algorithm.turn_discount:g} needs a baseline that is a mean of returns"
        remedy = f"set algorithm.advantage: {' or '.join(TURN_ADVANTAGES)}, or turn_discount: null"
        if critic.keeps_critic(config):
            remedy = "set turn_discount: null; algorithm.critic.gamma discounts turns"
        yield f"{problem}, which algorithm.advantage {algorithm.advantage} is not; {remedy}"
    if algorithm.overlong == "soft" and algorithm.overlong_buffer >= answer:
        problem = f"algorithm.overlong_buffer: {algorithm.overlong_buffer} is not below sampling.max_tokens {answer}"
        yield f"{problem}, every answer would be punished; lower it or raise sampling.max_tokens"


def _devices(config: Config) -> Iterator[str]:
    attention, parallel, model = config.learner.attention, config.rollout.tensor_parallel, config.model.path
    if (least := config.rollout.least_servers) > (most := config.rollout.most_servers):
        yield f"rollout.servers: min {least} is more than max {most}; lower it or raise max"
    if attention not in ("auto", "sdpa"):
        key = f"learner.attention: {attention}"
        if config.learner.device == "cpu":
            yield f"{key} needs a GPU, but learner.device is cpu; set learner.attention: auto"
        if config.model.dtype == "float32":
            yield f"{key} computes in bfloat16, but model.dtype is float32; set learner.attention: sdpa"
    heads = model_facts(model).queries_and_keys
    if problem := context_parallel.why_not(*heads, parallel):
        lower = next(n for n in range(parallel - 1, 0, -1) if not context_parallel.why_not(*heads, n))
        yield f"rollout.tensor_parallel: {problem} of {model}; set it to {lower}"


def _engine(config: Config) -> Iterator[str]:
    given = config.rollout.engine
    for name, ours in ENGINE_KEYS_ELSEWHERE.items():
        value = attrgetter(ours)(config)
        if name in given and given[name] != value:
            yield f"rollout.engine.{name}: {given[name]} contradicts {ours} {value}; remove it and set {ours}"
    yield from (f"rollout.engine.{name}: Headrace sets it; remove the key" for name in ENGINE_KEYS_SET if name in given)
    yield from _quantization(config)
    yield from _experts(config)
    if config.rollout.routing_replay:
        yield from _routing_replay(config)


def _experts(config: Config) -> Iterator[str]:
    facts, given = facts_of(config.model), config.rollout.engine
    if not facts.experts:
        return
    yield from _untried_experts(config, facts)
    what = f"policies cannot be loaded into the {facts.experts} experts of {config.model.path}"
    for key in SPREAD:
        if given.get(key):
            yield f"rollout.engine.{key}: {given[key]}, with which {what}; remove the key"
    if given.get("quantization"):
        yield f"rollout.engine.quantization: {given['quantization']}, with which {what}; remove the key"
    if (kernel := given.get("moe_backend", "auto")) not in EXPERT_KERNELS:
        yield f"rollout.engine.moe_backend: {kernel}, with which {what}; set one of {', '.join(EXPERT_KERNELS)}"


def _untried_experts(config: Config, facts: ModelFacts) -> Iterator[str]:
    """Mixtures that failed, or that no trial of a server can judge."""
    model, device = f"{config.model.path} is of type {facts.kind}", config.rollout.device
    compared = is_proven(facts.kind, device, config.rollout.tensor_parallel)
    if fault := next((one.fault for one in failing(device) if one.kind == facts.kind), ""):
        yield f"model.path: {model}, of which vLLM on this device ({device}) {fault}; {OTHER_MIXTURE}"
    elif facts.image_token is not None:
        rule = "servers load no policies into a mixture of experts that sees images"
        yield f"model.path: {model}, and {rule}; set model.text_alone: true"
    elif config.weights.probe_every == 0 and not (config.model.lora or compared):
        problem = f"{model}, whose experts only a probe of the first policy compares with the learner"
        yield f"weights.probe_every: 0, and {problem}; set it to 1"


def _routing_replay(config: Config) -> Iterator[str]:
    facts, given, key = model_facts(config.model.path), config.rollout.engine, "rollout.routing_replay: true"
    if facts.kind and not facts.experts:
        yield f"{key}, but {config.model.path} ({facts.kind}) has no experts; set it to false"
    elif facts.kind and facts.kind not in REPLAYED:
        rule = f"the learner replays routes of {', '.join(REPLAYED)} only"
        yield f"{key}, but {config.model.path} is of type {facts.kind}, and {rule}; set it to false"
    if config.rollout.device == "cpu":
        yield f"{key} needs a GPU, but rollout.device is cpu, where vLLM returns no routes; set it to false"
    if given.get("enable_prefix_caching") is False:
        yield f"{key} needs vLLM's prefix cache; remove rollout.engine.enable_prefix_caching, or set it to false"
    for name in NEVER_REPLAYED:
        if given.get(name, 1) != 1:
            yield f"{key}, and with rollout.engine.{name} {given[name]} vLLM returns no routes; remove one of them"


def _quantization(config: Config) -> Iterator[str]:
    value = config.rollout.engine.get("quantization")
    key = f"rollout.engine.quantization: {value}"
    if value is None:
        return
    if value not in QUANTIZATIONS:
        yield f"{key} does not quantise each policy as it is loaded; set one of {', '.join(QUANTIZATIONS)}"
    if config.rollout.device == "cpu":
        yield f"{key} needs a GPU, but rollout.device is cpu; remove the key"
    if config.model.dtype == "float32":
        yield f"{key} quantises bfloat16, but model.dtype is float32; set model.dtype: bfloat16 or remove the key"


def _lora(config: Config) -> Iterator[str]:
    lora, model, engine = config.model.lora, config.model.path, config.rollout.engine
    if lora is None:
        return
    known = model_facts(model).linear
    if not lora.targets:
        yield "model.lora.targets: [] leaves nothing to train; name linear layers, as [q_proj, v_proj], or set all"
    for name in lora.targets if known and lora.targets != "all" else ():
        if name not in known:
            has = f"the blocks of {model} have {', '.join(sorted(known))}"
            yield f"model.lora.targets: {name}: {has}; name some of these, or set all"
    if config.model.freeze:
        parts = f"[{', '.join(config.model.freeze)}]"
        yield f"model.freeze: {parts} with model.lora, which trains an adapter of the text model alone; remove it"
    for name in LORA_ENGINE_KEYS:
        if name in engine:
            yield f"rollout.engine.{name}: Headrace sets it with model.lora; remove the key"
    if engine.get("quantization") in QUANTIZATIONS:
        key = f"rollout.engine.quantization: {engine['quantization']}"
        yield f"{key} quantises policies as they are pushed, and with model.lora only an adapter is; remove the key"


def _addresses(config: Config) -> Iterator[str]:
    address, port, host = config.buffer.address, config.buffer.port, config.weights.host
    if port not in (None, "*") and not 1 <= int(port) <= 65535:
        yield f"buffer.address: {address} has no port between 1 and 65535; choose another"
    if host in ("0.0.0.0", "::", "[::]", "*"):
        yield f"weights.host: {host} is no address that servers can connect to; name one of this machine"


def _sizes(config: Config) -> Iterator[str]:
    batch, buffer, tokens = config.batch, config.buffer, _stored_tokens(config)
    group_mib = max_group_bytes(config) / 2**20
    batch_gib = batch.groups * group_mib / 2**10
    if group_mib > buffer.max_message_mib:
        group = f"a group of batch.samples {batch.samples} x {tokens} tokens can take, {group_mib:.0f} MiB"
        problem = f"buffer.max_message_mib: {buffer.max_message_mib} is less than {group}"
        yield f"{problem}; set it to {int(group_mib) + 1} or more"
    if batch_gib > buffer.max_gib:
        samples = f"{batch.groups} x {batch.samples} samples of {tokens} tokens"
        whole = f"one batch of {samples} can take, {batch_gib:.1f} GiB"
        problem = f"buffer.max_gib: {buffer.max_gib} is less than {whole}, so it could never fill"
        yield f"{problem}; set it to {int(batch_gib) + 1} or more"


def _epochs(config: Config, problems: int | None) -> Iterator[str]:
    epochs, groups, versions = config.data.epochs, config.batch.groups, config.run.versions
    if problems == 0:
        yield f"data.train: {source_name(config.data.train)} has no problems; name a file that has"
    if not problems or epochs is None or epochs * problems >= versions * groups:
        return
    problem = f"data.epochs: {epochs} x {problems} problems = {epochs * problems} groups"
    needed = f"run.versions {versions} x batch.groups {groups} = {versions * groups}"
    remedy = f"set data.epochs: {-(-versions * groups // problems)} (or null)"
    yield f"{problem}, but {needed}; {remedy} or run.versions: {max(1, epochs * problems // groups)}"


def _evaluation(config: Config) -> Iterator[str]:
    held, prompt = config.rollout.engine.get("max_model_len"), config.data.max_prompt_tokens
    if config.eval.every is not None and not config.data.eval:
        yield f"eval.every: {config.eval.every}, but data.eval names no problems; name some or set eval.every: null"
    for name, given in zip(list(config.data.sources())[1:], config.data.eval.values(), strict=True):
        key, samples = f"data.{name}", given.samples
        if given.k and max(given.k) > samples:
            yield f"{key}.k: {max(given.k)} is more than {key}.samples {samples}; lower it or raise {key}.samples"
        if samples > 1 and given.temperature == 0:
            problem = f"{key}.temperature: 0 makes all of {key}.samples {samples} answers the same"
            yield f"{problem}; raise it or set {key}.samples: 1"
        if given.max_tokens and isinstance(held, int) and held < prompt + given.max_tokens:
            sample = f"data.max_prompt_tokens {prompt} + {key}.max_tokens {given.max_tokens}"
            yield f"rollout.engine.max_model_len: {held} is less than {sample}; raise it or lower {key}.max_tokens"


def _functions(config: Config, files: Collection[str]) -> Iterator[str]:
    rewards = [("reward.function", part.function) for part in config.reward.parts]
    for key, value in (("algorithm.loss", config.algorithm.loss), ("algorithm.advantage", config.algorithm.advantage)):
        file, _, function = value.rpartition(":")
        if file and key in files:
            yield from _defined(key, file, function)
    for key, value in (*rewards, ("rollout.task", config.rollout.task)):
        file, _, function = value.rpartition(":")
        if value == NO_REWARD:  # `teachers.py` judges it
            continue
        if value == "task" and not isinstance(config.reward.function, str):
            yield "reward.function: task stands alone; remove it from the list, its score is the metric task_score"
        elif value not in BUILT_IN[key] and not file.endswith(".py"):
            yield f"{key}: {value!r} is neither one of {', '.join(BUILT_IN[key])} nor path/to/file.py:function"
        elif file and key in files:
            yield from _defined(key, file, function)
        elif value == "reasoning_gym" and key in files and importlib.util.find_spec(value) is None:
            yield f"{key}: {value}: reasoning-gym is not installed here; {INSTALL}"


def _rewards(config: Config) -> Iterator[str]:
    reward, parts = config.reward, config.reward.parts
    if not isinstance(reward.function, str):
        names = [part.metric for part in parts]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"reward.function: {names.count(name)} entries are called {name}; give them a name each"
        if not any(part.weight for part in parts):
            yield "reward.function: every weight is 0, so all rewards are equal; give one of them another weight"
        if reward.kwargs:
            yield "reward.kwargs: several functions do not share them; write kwargs into the entries of reward.function"
    using = [part for part in parts if part.uses_servers]
    if using and not reward.servers:
        remedy = "set its url in kwargs, or let the run start one: reward.servers: 1 and reward.model"
        yield f"reward.function: reward_model has no server to ask; {remedy}"
    if reward.servers and not using:
        remedy = "set reward.function: reward_model without url, or reward.servers: 0"
        yield f"reward.servers: {reward.servers}, but no reward function uses them; {remedy}"
    if reward.servers and reward.model is None:
        yield f"reward.servers: {reward.servers}, but they have no model; set reward.model"
    if reward.servers and reward.model is not None:
        facts = model_facts(reward.model)
        yield from (f"reward.model: {reward.model} ({facts.kind}): {line}" for line in facts.unserved)
    if reward.model is not None and not reward.servers:
        yield f"reward.model: {reward.model} is served by nobody; set reward.servers: 1, or remove the key"
    if any("model" in part.kwargs for part in using) and reward.model is not None:
        yield "reward.kwargs.model: the run's own servers have reward.model; remove the key"
    yield from (
        f"reward.engine.{name}: Headrace sets it; remove the key" for name in REWARD_KEYS & reward.engine.keys()
    )
    last = reward.port + reward.servers - 1
    if reward.servers and last > 65535:
        yield f"reward.port: the last of {reward.servers} reward servers would listen on {last}; lower it"
    port = config.buffer.port or ""
    if port.isdigit() and reward.port <= int(port) <= last:
        yield f"reward.port: {reward.port} to {last} for the reward servers include the buffer's; choose others"


def _chat(config: Config) -> Iterator[str]:
    for name in config.rollout.chat.template_kwargs:
        if name in TEMPLATE_WORDS:
            yield f"rollout.chat.template_kwargs.{name}: Headrace gives the template this argument; remove it"
    if config.reward.function == "task" and config.rollout.task == "single_turn":
        remedy = "name a task of your own that returns a score, or a reward function"
        yield f"reward.function: task, but rollout.task single_turn scores nothing; {remedy}"


def _agents(config: Config, files: Collection[str]) -> Iterator[str]:
    task, command, environment = config.rollout.task, config.rollout.agent.command, config.rollout.environment
    host, public = config.rollout.chat.host, config.rollout.chat.public_url
    if (task == "agent") != bool(command):
        remedy = "set both, or neither"
        yield f"rollout.agent.command: {' '.join(command) or 'empty'}, but rollout.task is {task}; {remedy}"
    elif command and "rollout.agent.command" in files and shutil.which(command[0]) is None:
        yield f"rollout.agent.command: {command[0]}: no such program here (from {Path.cwd()}); correct it"
    for name in ("id", "python"):
        if (task == "environment") != ((value := getattr(environment, name)) is not None):
            yield f"rollout.environment.{name}: {value or 'null'}, but rollout.task is {task}; set both, or neither"
    python = environment.python
    if python and "rollout.environment.python" in files and not (python.is_file() and os.access(python, os.X_OK)):
        remedy = "make that Python's virtual environment, or correct the path"
        yield f"rollout.environment.python: {python}: no such program (from {Path.cwd()}); {remedy}"
    if host in ("0.0.0.0", "::") and public is None:
        yield f"rollout.chat.host: {host} is no address that agents can call; set rollout.chat.public_url"
    if config.rollout.chat.port and (most := config.rollout.most_servers) > 1:
        remedy = "set it to 0, each then takes a free one, or rollout.servers to 1"
        yield f"rollout.chat.port: {config.rollout.chat.port} for {most} servers; {remedy}"


def _defined(key: str, file: str, function: str) -> Iterator[str]:
    """Where the file may define names while it runs, its import decides later."""
    if file.endswith(tuple(EXTENSION_SUFFIXES)) and Path(file).is_file():  # compiled
        return
    try:
        source = decode_source(Path(file).read_bytes())
        symbols, tree = symtable.symtable(source, file, "exec").get_symbols(), ast.parse(source)
    except (OSError, SyntaxError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        problem = f"no such file (from {Path.cwd()})" if missing else f"not Python: {error}"
        yield f"{key}: {file}: {problem}; correct it"
        return
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    unknown = DEFINING & {symbol.get_name() for symbol in symbols} or "*" in imported
    if not unknown and function not in {
        each.get_name() for each in symbols if each.is_assigned() or each.is_imported()
    }:
        names = [symbol.get_name() for symbol in symbols if symbol.is_namespace()]
        public = ", ".join(name for name in names if not name.startswith("_"))
        yield f"{key}: {file} has no function {function}; it has {public or 'none'}"


def _trackers(config: Config, files: Collection[str]) -> Iterator[str]:
    for name in config.log.trackers if "log.trackers" in files else ():
        if importlib.util.find_spec(name) is None:
            remedy = 'pip install "headrace[tracking]", or remove it from the list'
            yield f"log.trackers: {name} is not installed here; {remedy}"


def _files(config: Config, files: Collection[str]) -> Iterator[str]:
    if "model.path" in files:
        yield from _model("model.path", config.model.path, WEIGHTS in files)
    if config.reward.model is not None and "reward.model" in files:
        yield from _reward_model(config)
    for rows, teacher in config.teacher.teachers.items() if "teacher.model" in files else ():
        if teacher.servers and teacher.model is not None:
            yield from _model(f"{teachers.key_of(config.teacher, rows)}.model", teacher.model)
    data = config.data
    for key, source in data.sources().items():
        if f"data.{key.partition('.')[0]}" in files:
            yield from (f"data.{key}: {line}" for line in problems_with(source))
    if data.demonstrations and "data.demonstrations" in files:
        yield from (f"data.demonstrations.path: {line}" for line in problems_with(data.demonstrations.path))
    for key, path in (("data.chat_template", data.chat_template), ("data.format_prompt", data.format_prompt)):
        if key in files and isinstance(path, Path):
            if not path.is_file():
                problem = "not a file" if path.exists() else "no such file"
                yield f"{key}: {path}: {problem} (from {Path.cwd()}); correct the path"
            elif unreadable := _unreadable_text(path):
                yield f"{key}: {path}: {unreadable}"
            elif key == "data.format_prompt":
                yield from _template(path)
    folder = data.image_dir
    if folder and "data.image_dir" in files and not folder.is_dir():
        yield f"data.image_dir: {folder}: no such folder (from {Path.cwd()}); correct the path"
    if "run.folder" in files:
        place = existing(config.run.path)
        if not os.access(place, os.W_OK | os.X_OK):
            remedy = "choose another folder or change its permissions"
            yield f"run.folder: {config.run.folder}: {place} cannot be written to; {remedy}"


def _reward_model(config: Config) -> Iterator[str]:
    path = str(config.reward.model)
    problems = list(_model("reward.model", path))
    yield from problems
    file = Path(path) / "config.json"
    if problems or not file.is_file() or "convert" in config.reward.engine:
        return
    config_json = json.loads(file.read_text(encoding="utf-8"))
    if not scores(config_json):
        found = architectures(config_json) or ["none"]
        remedy = "name a sequence classification model, or set reward.engine.convert: classify if it is one"
        yield f"reward.model: {path} is no reward model, its architecture is {', '.join(found)}; {remedy}"


def _model(key: str, path: str, weights: bool = True) -> Iterator[str]:
    folder = Path(path)
    depth = len(folder.parts)
    local = path.startswith(("/", ".", "~")) or depth > 2 or (depth == 2 and folder.parent.is_dir())
    if folder.is_dir():
        yield from (f"{key}: {path}: {line}" for line in faults(folder, weights, served=key != "model.path"))
    elif local or folder.exists():
        remedy = "correct the path, or use a hub name such as Qwen/Qwen2.5-1.5B"
        yield f"{key}: {path}: no such folder (from {Path.cwd()}); {remedy}"


def _unreadable_text(path: Path) -> str:
    try:
        path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read as text: {error}; write it as UTF-8"
    return ""


def _template(path: Path) -> Iterator[str]:
    """To compile a template would compute its constants, so it is only parsed."""
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    jinja = ImmutableSandboxedEnvironment()
    try:
        tree = jinja.parse(path.read_text(encoding="utf-8-sig"))
        if all(name.name != "content" for name in tree.find_all(nodes.Name)):
            lacks = "it does not name content, so no prompt has its problem; write {{ content }}"
            yield f"data.format_prompt: {path}: {lacks}"
        for node in tree.find_all((nodes.Filter, nodes.Test)):
            kind, known = ("filter", jinja.filters) if isinstance(node, nodes.Filter) else ("test", jinja.tests)
            if node.name not in known:
                yield f"data.format_prompt: {path}:{node.lineno}: No {kind} named {node.name!r}."
    except TemplateSyntaxError as error:
        yield f"data.format_prompt: {path}:{error.lineno}: {error.message}"
