"""Which keys of the run file may differ when a run is started again. The others make the fingerprint that all processes
of a run must share."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from configs.help import FACTORS, RENAMED_KEYS, keys, show
from configs.load import ConfigError, load
from configs.origins import comparable, recorded
from configs.schema import Config, DemonstrationsConfig, DifficultyConfig, LoraConfig, Section

CHANGEABLE = (
    *("run.versions", "run.folder"),
    *("data.eval", "data.eval.*", "data.epochs"),
    *("reward.timeout_s", "reward.workers", "reward.memory_gib", "reward.max_calls", "reward.concurrency"),
    *("reward.servers", "reward.host", "reward.port", "reward.engine"),
    *("teacher.url", "teacher.servers", "teacher.host", "teacher.port", "teacher.engine"),
    *("teacher.timeout_s", "teacher.retries", "teacher.api_key_env"),
    *("batch.max_staleness", "batch.target_staleness"),
    *("learner.lr", "learner.schedule", "learner.warmup_versions", "learner.max_grad_norm"),
    *("learner.betas", "learner.eps", "learner.weight_decay", "algorithm.critic.learning_rate"),
    *("learner.nodes", "learner.shard", "learner.checkpoint_on"),
    *("learner.ranks", "learner.device", "learner.threads", "learner.attention", "learner.compile"),
    *("learner.tokens_per_microbatch", "learner.share_prompts", "learner.head_chunk_tokens"),
    "learner.matmul",
    *("learner.activation_checkpointing", "learner.gather", "learner.context_parallel"),
    *("learner.cpu_offload", "learner.timeout_s", "learner.checkpoint_every", "learner.keep_*", "learner.export_every"),
    *("rollout.servers", "rollout.servers.*", "rollout.drain_s"),
    *("rollout.tensor_parallel", "rollout.device", "rollout.sequences", "rollout.attempts"),
    *("rollout.heartbeat_s", "rollout.engine", "rollout.max_failed_share"),
    *("rollout.sample_attempts", "rollout.task_timeout_s", "rollout.task_memory_gib", "rollout.task_workers"),
    *("rollout.chat.host", "rollout.chat.port", "rollout.chat.public_url", "rollout.environment.python"),
    *("buffer.address", "buffer.fsync", "buffer.keep", "buffer.max_*"),
    *("weights.*", "eval.*", "log.*", "cluster.*"),
)
"""None of these decides which problem comes next, or what a stored sample means."""

FORK = " and --fork-from"

Settings = dict[str, Any]


class Change(NamedTuple):
    """A key whose value differs from that of the launch before, as `run.versions: 100 -> 200`."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {show(self.old)} -> {show(self.new)}"


def fingerprint(config: Config) -> str:
    """Return 16 hex digits over the fixed keys.

    Defaults do not count, so that a release that adds a key goes on with earlier runs.
    """
    dumped = recorded(config, exclude_defaults=True)
    fixed = {key: value for key, value in _flat(dumped) if not is_changeable(key)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def settings(config: Config) -> Settings:
    """As the ledger has it: without credentials."""
    return dict(_flat(recorded(config)))


def is_changeable(key: str) -> bool:
    return any(fnmatch(key, pattern) for pattern in CHANGEABLE)


def changes(before: Settings | None, config: Config) -> list[Change]:
    """Raise ConfigError if a fixed key differs. A key that an earlier release lacked counts as its default."""
    if before is None:
        return []
    renamed = {
        RENAMED_KEYS.get(key, key): value * before[FACTORS[key]] if key in FACTORS else value
        for key, value in before.items()
    }
    sections = {name: section.annotation.model_construct() for name, section in Config.model_fields.items()}  # type: ignore[union-attr]
    known = dict(_flat({name: section.model_dump(mode="json") for name, section in sections.items()})) | renamed
    forms: dict[str, type[Section]] = {
        "model.lora": LoraConfig,
        "data.difficulty": DifficultyConfig,
        "data.demonstrations": DemonstrationsConfig,
    }
    for key, form in forms.items():
        if given := known[key]:  # the store has it as it was written
            known[key] = form.model_validate(given).model_dump(mode="json")
    both = {key: comparable(key, known.get(key), value, config) for key, value in settings(config).items()}
    found = [Change(key, old, new) for key, (old, new) in both.items() if old != new]
    again = "begin another run with run.name" + FORK * (config.sft.rows is None)
    remedy = f"it may not change while the run goes on: undo that, or {again}"
    if fixed := [change for change in found if not is_changeable(change.key)]:
        raise ConfigError([f"{change}; {remedy}" for change in fixed])
    return found


def written(run: Path) -> Settings | None:
    """Settings in a run's `config.yaml`, if any."""
    file = run / "config.yaml"
    return settings(load([str(file)], lenient=True)) if file.exists() else None


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if (key := f"{above}{name}") in keys():
            yield key, value
        else:
            yield from _flat(value, f"{key}.")
