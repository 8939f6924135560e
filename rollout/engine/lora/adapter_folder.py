"""An adapter's folder in PEFT's format: what it adapts, and whether a base can serve it."""

import json
import logging
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from subprocess import PIPE

from safetensors import safe_open

from configs.entrypoint import BAD_INPUT
from configs.load import ConfigError
from configs.model_folder import weight_files
from configs.own_packages import command
from configs.schema import Config, LoraConfig
from learner.weights.plan import LORA_A, LORA_B

log = logging.getLogger(__name__)
NUMBER = 1
SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MANIFEST = "manifest.json"
PREFIX = "base_model.model."
STILL_S = 30.0
"""Seconds between lines of the log while a model is read."""
UNSERVED = ("use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication")
"""PEFT's settings that change what an adapter computes."""


@dataclass(frozen=True)
class AdapterFolder:
    """Settings and layers of an adapter, without its tensors."""

    folder: Path
    rank: int
    scale: float
    base: str
    layers: dict[str, tuple[int, ...]]
    """Outputs and inputs, such as `{"model.layers.0.mlp.up_proj": (12288, 4096)}`."""

    @classmethod
    def read(cls, folder: Path) -> "AdapterFolder":
        """Raises ValueError if vLLM cannot serve it."""
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        unserved = [key for key in UNSERVED if settings.get(key)]
        only = {"peft_type": "LORA", "bias": "none"}
        unserved += [f"{key} {settings[key]}" for key, value in only.items() if settings.get(key, value) != value]
        if unserved:
            what = ", ".join(unserved)
            raise ValueError(
                f"{folder / SETTINGS}: {what}; only plain LoRA is served, so merge it into its base by peft"
            )
        if lacking := [key for key in ("r", "lora_alpha") if not settings.get(key)]:
            raise ValueError(f"{folder / SETTINGS}: {lacking[0]} is missing; save the adapter by peft")
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"{folder}: no {WEIGHTS} there; save the adapter as safetensors")
        shapes = {name.removeprefix(PREFIX): shape for name, shape in shapes_in(folder / WEIGHTS)}
        layers: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            layer = name.removesuffix(LORA_A).removesuffix(LORA_B)
            if not {layer + LORA_A, layer + LORA_B} <= set(shapes):
                raise ValueError(f"{folder / WEIGHTS}: {name} is not one of a layer's lora_A and lora_B")
            if name.endswith(LORA_B):
                layers[layer] = (shape[0], shapes[layer + LORA_A][1])
        rank, alpha = settings["r"], settings["lora_alpha"]
        scale = alpha / (sqrt(rank) if settings.get("use_rslora") else rank)
        return cls(folder, rank, scale, settings.get("base_model_name_or_path") or "", layers)

    def problem(self, path: str) -> str:
        """Return why the model at `path` is not the base, by name, digest or shapes, or "". Raises ValueError if it is
        unreadable."""
        if self.base and not same_model(self.base, path):
            if not (known := base_digest(self.folder.parent)):
                return f"an adapter of {self.base}"
            if (read := digest_like(self.folder.parent, path)) != known:
                return f"an adapter of {self.base} (digest {known}), not of weights whose digest is {read}"
        files = weight_files(Path(path))
        base = {without_part(name.removesuffix(".weight")): shape for file in files for name, shape in shapes_in(file)}
        for layer, shape in self.layers.items() if base else ():
            if (found := base.get(without_part(layer), "missing")) != shape:
                return f"an adapter of a model where {layer} is {shape}, not {found}"
        return ""


def shapes_in(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            yield name, tuple(tensors.get_slice(name).get_shape())


def without_part(name: str) -> str:
    """Drop the word for a text model within another, which some files lack."""
    return name.replace("language_model.", "")


def is_adapter(folder: Path) -> bool:
    return (folder / SETTINGS).is_file()


def same_model(one: str, other: str) -> bool:
    """Whether paths or hub names may mean the same model, by the last parts if one leads nowhere here."""
    if Path(one).is_dir() and Path(other).is_dir():
        return Path(one).resolve() == Path(other).resolve()
    return Path(one).name == Path(other).name


def base_digest(checkpoint: Path) -> str:
    """Return the learner's digest of the base weights in a checkpoint's manifest, or ""."""
    manifest = checkpoint / MANIFEST
    found = json.loads(manifest.read_text(encoding="utf-8")).get("adapter") if manifest.is_file() else None
    return str(found["base"]) if isinstance(found, dict) and "base" in found else ""


def digest_like(checkpoint: Path, path: str) -> str:
    """Have a learner's process compute the digest of the whole model. Raises ValueError."""
    log.warning("reading all of %s: the adapter in %s is of a base of another name", path, checkpoint)
    return last_word(command("learner", "digest", str(checkpoint), path))


def last_word(command: Sequence[str], every_s: float = STILL_S) -> str:
    """Return the last word that `command` writes. Raises ValueError if it fails."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            while True:
                try:
                    said, errors = process.communicate(timeout=every_s)
                    break
                except subprocess.TimeoutExpired:
                    told = shlex.join(command), time.monotonic() - began
                    log.warning("%s: has run for %.0f s and goes on; Ctrl-C ends it", *told)
        finally:
            process.kill()
            process.wait()
    if (code := process.returncode) == BAD_INPUT and errors.strip():
        raise ValueError(errors.splitlines()[-1])
    if code:
        how = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
        raise ValueError(f"{shlex.join(command)}: {how}: {(errors.splitlines() or ['it said nothing'])[-1]}")
    return said.split()[-1]


def evaluated_as(config: Config, models: Sequence[Path]) -> Config:
    """Return `config` with the `model.lora` that `models` need. Raises ConfigError if an adapter has another base, or
    other whole weights stand beside adapters; ValueError as `problem`."""
    path, lora, problems = config.model.path, None, []
    adapters = [AdapterFolder.read(model) for model in models if is_adapter(model)]
    for adapter in adapters:
        if problem := adapter.problem(path):
            problems.append(f"--models {adapter.folder}: {problem}; model.path is {path}, set it to the adapter's base")
    if adapters:
        targets = sorted({layer.rpartition(".")[2] for adapter in adapters for layer in adapter.layers})
        lora = LoraConfig(rank=max(adapter.rank for adapter in adapters), targets=targets)
        others = [model for model in models if not is_adapter(model) and model.resolve() != Path(path).resolve()]
        why = f"whole weights beside adapters of {path}, on which one engine serves them; evaluate it by itself"
        problems += [f"--models {model}: {why}" for model in others]
    if problems:
        raise ConfigError(problems)
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
