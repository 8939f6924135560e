"""Refuses a run file whose keys contradict each other or the machine, before any process starts.

Every rule is a generator of lines: the key with its value, the other key with its value, the remedy. `check` runs all
of them, so that everything wrong is told at once. A rule reads the Config and at most looks whether files exist; what
makes a run slow rather than impossible is a note of `configs.explain`. Every entry point runs this at its start.
"""

import ast
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from configs.load import ConfigError
from configs.model_facts import model_facts
from configs.schema import Config

TOKEN_BYTES = 13
"""Bytes of a token in a stored sample: int32 token, uint8 sampled, float32 log-probability, int32 version."""

FILES = ("model.path", "data.train", "data.eval", "data.format_prompt", "reward.function", "rollout.task", "run.folder")
"""Keys that name something on disk. Each process has `check` look for what it reads itself."""

ENGINE_KEYS_ELSEWHERE = {
    "model": "model.path",
    "tokenizer": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "seed": "run.seed",
}
"""Fields of vLLM's engine arguments that have a key of their own in the run file."""

ENGINE_KEYS_SET = (
    "worker_extension_cls",
    "logprobs_mode",
    "skip_tokenizer_init",
    "data_parallel_size",
    "pipeline_parallel_size",
)
"""Fields of vLLM's engine arguments that Headrace sets itself."""


def check(
    config: Config,
    *,
    problems: int | None = None,
    files: Collection[str] = FILES,
    has_keys: bool = True,
    further: Iterable[str] = (),
) -> None:
    """Raise ConfigError with every contradiction, one line each.

    `problems`: rows of data.train, where known. `files`: keys whose files must be on this machine. `has_keys`: whether
    CURVE keys are at hand. `further`: lines that somebody else found, such as columns missing from the data.
    """
    found = [
        *_lengths(config), *_cut(config), *_staleness(config), *_algorithm(config), *_devices(config), *_engine(config),
        *_wire(config, has_keys), *_sizes(config), *_epochs(config, problems), *_files(config, files), *further,
    ]  # fmt: skip
    if found:
        raise ConfigError(found)


def longest(config: Config) -> int:
    """Tokens of the longest possible sample of one turn: prompt and answer."""
    return config.data.max_prompt_tokens + config.sampling.max_tokens


def loopback(host: str) -> bool:
    """Whether nothing outside this machine can reach `host`."""
    return host in ("localhost", "[::1]", "::1") or host.startswith("127.")


def _lengths(config: Config) -> Iterator[str]:
    prompt, answer, tokens = config.data.max_prompt_tokens, config.sampling.max_tokens, longest(config)
    parts = f"data.max_prompt_tokens {prompt} + sampling.max_tokens {answer} = {tokens}"
    limit = config.rollout.engine.get("max_model_len")
    if isinstance(limit, int) and limit < tokens:
        yield (
            f"rollout.engine.max_model_len: {limit} is less than {parts}; set it to {tokens} or more, or shorten those"
        )
    budget = config.learner.tokens_per_microbatch
    if isinstance(budget, int) and budget < tokens:
        yield (
            f"learner.tokens_per_microbatch: {budget} is less than {parts}, the longest sample; set it to {tokens} or "
            "more"
        )
    facts = model_facts(config.model.path)
    if facts.positions is not None and facts.positions < tokens:
        yield f"model.path: {config.model.path} has {facts.positions} positions, less than {parts}; shorten those"


def _cut(config: Config) -> Iterator[str]:
    batch, ranks = config.batch, config.learner.ranks
    if batch.groups * batch.samples < ranks:
        yield (
            f"learner.ranks: {ranks} is more than batch.groups {batch.groups} x batch.samples {batch.samples} = "
            f"{batch.groups * batch.samples} samples, a rank would get nothing; raise batch.groups or lower "
            "learner.ranks"
        )


def _staleness(config: Config) -> Iterator[str]:
    target, most = config.batch.target_staleness, config.batch.max_staleness
    if target is not None and target > most:
        yield (
            f"batch.target_staleness: {target} is more than batch.max_staleness {most}; lower it to {most} or raise "
            "the bound"
        )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.constant_length is not None and algorithm.aggregation != "constant":
        yield (
            f"algorithm.constant_length: {algorithm.constant_length} has no effect with algorithm.aggregation "
            f"{algorithm.aggregation}; set algorithm.aggregation: constant or constant_length: null"
        )
    if algorithm.loss == "gspo" and algorithm.aggregation in ("prompt", "constant"):
        yield (
            f"algorithm.aggregation: {algorithm.aggregation} has no effect with algorithm.loss gspo, a mean over "
            "samples by definition; set algorithm.aggregation: sequence or another loss"
        )
    if algorithm.overlong == "soft" and algorithm.overlong_buffer >= config.sampling.max_tokens:
        yield (
            f"algorithm.overlong_buffer: {algorithm.overlong_buffer} is not below sampling.max_tokens "
            f"{config.sampling.max_tokens}, "
            "every answer would be punished; lower it or raise sampling.max_tokens"
        )


def _devices(config: Config) -> Iterator[str]:
    attention = config.learner.attention
    if attention in ("flash", "varlen") and config.learner.device == "cpu":
        yield f"learner.attention: {attention} needs a GPU, but learner.device is cpu; set learner.attention: auto"
    if attention in ("flash", "varlen") and config.model.dtype == "float32":
        yield (
            f"learner.attention: {attention} computes in bfloat16, but model.dtype is float32; set learner.attention: "
            "sdpa"
        )
    heads, parallel = model_facts(config.model.path).heads, config.rollout.tensor_parallel
    if heads is not None and heads % parallel:
        yield (
            f"rollout.tensor_parallel: {parallel} does not divide the {heads} attention heads of {config.model.path}; "
            "lower it"
        )


def _engine(config: Config) -> Iterator[str]:
    for name, ours in ENGINE_KEYS_ELSEWHERE.items():
        section, key = ours.split(".")
        value = getattr(getattr(config, section), key)
        if name in config.rollout.engine and config.rollout.engine[name] != value:
            yield (
                f"rollout.engine.{name}: {config.rollout.engine[name]} contradicts {ours} {value}; remove it and set "
                f"{ours}"
            )
    for name in ENGINE_KEYS_SET:
        if name in config.rollout.engine:
            yield f"rollout.engine.{name}: Headrace sets it; remove the key"


def _wire(config: Config, has_keys: bool) -> Iterator[str]:
    address = config.buffer.address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if port != "*" and not 1 <= int(port) <= 65535:
        yield f"buffer.address: {address} has no port between 1 and 65535; choose another"
    if not loopback(host) and not has_keys:
        yield (
            f"buffer.address: {address} can be reached from outside and there are no CURVE keys; let `python -m actors "
            "launch` "
            "make them, or use tcp://127.0.0.1"
        )


def _sizes(config: Config) -> Iterator[str]:
    batch, limits, tokens = config.batch, config.buffer, longest(config)
    group_mib = batch.samples * tokens * TOKEN_BYTES / 2**20
    if group_mib > limits.max_message_mib:
        yield (
            f"buffer.max_message_mib: {limits.max_message_mib} is less than a group of batch.samples {batch.samples} x "
            f"{tokens} tokens "
            f"can take, {group_mib:.0f} MiB; set it to {int(group_mib) + 1} or more"
        )
    batch_gib = batch.groups * group_mib / 2**10
    if batch_gib > limits.max_gib:
        yield (
            f"buffer.max_gib: {limits.max_gib} is less than one batch of {batch.groups} x {batch.samples} samples of "
            f"{tokens} tokens "
            f"can take, {batch_gib:.1f} GiB, so it could never fill; set it to {int(batch_gib) + 1} or more"
        )


def _epochs(config: Config, problems: int | None) -> Iterator[str]:
    if problems == 0:
        yield f"data.train: {config.data.train} has no problems; name a file that has"
    epochs, groups, versions = config.data.epochs, config.batch.groups, config.run.versions
    if not problems or epochs is None or epochs * problems >= versions * groups:
        return
    needed = -(-versions * groups // problems)
    yield (
        f"data.epochs: {epochs} x {problems} problems = {epochs * problems} groups, but run.versions {versions} x "
        f"batch.groups {groups} = "
        f"{versions * groups}; set data.epochs: {needed} (or null) or run.versions: "
        f"{max(1, epochs * problems // groups)}"
    )


def _files(config: Config, files: Collection[str]) -> Iterator[str]:
    if "model.path" in files:
        yield from _model(config.model.path)
    for name in ("train", "eval", "format_prompt"):
        path = getattr(config.data, name)
        if f"data.{name}" in files and path is not None and not path.is_file():
            yield (
                f"data.{name}: {path}: {'not a file' if path.exists() else 'no such file'} (from {Path.cwd()}); "
                "correct the path"
            )
    for name, value in (("reward.function", config.reward.function), ("rollout.task", config.rollout.task)):
        if name in files:
            yield from _function(name, value)
    if "run.folder" in files:
        path = config.run.path.absolute()
        place = next(parent for parent in (path, *path.parents) if parent.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            yield (
                f"run.folder: {config.run.folder}: {place} cannot be written to; choose another folder or change its "
                "permissions"
            )


def _model(path: str) -> Iterator[str]:
    """A hub name is `name` or `organisation/name`; whatever else there is must be a folder."""
    folder = Path(path)
    depth = len(folder.parts)
    local = path.startswith(("/", ".", "~")) or depth > 2 or (depth == 2 and folder.parent.is_dir())
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield f"model.path: {path}: has no config.json; name a folder in Hugging Face format"
    elif local or folder.exists():
        yield (
            f"model.path: {path}: no such folder (from {Path.cwd()}); correct the path, or use a hub name such as "
            "Qwen/Qwen2.5-1.5B"
        )


def _function(key: str, value: str) -> Iterator[str]:
    """`path/to/file.py:function` must exist; a plain name is for the registry of `rollout` to judge."""
    file, colon, function = value.rpartition(":")
    if not colon:
        if value.endswith(".py"):
            yield f"{key}: {value} names a file and no function; write {value}:function"
        return
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield f"{key}: {file}: no such file (from {Path.cwd()}); correct the path"
        return
    except (OSError, SyntaxError, ValueError) as error:
        yield f"{key}: {file}: not a Python file: {error}; mend it"
        return
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [name for name in names if not name.startswith("_")]
    if function not in {*names, *_bound(tree)}:
        yield f"{key}: {file} has no function {function}; it has {', '.join(public) or 'none'}"


def _bound(tree: ast.Module) -> Iterator[str]:
    """Names that a module binds other than by `def`: imports, classes, assignments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
