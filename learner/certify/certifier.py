"""Makes a certificate with a small copy of a model. Reads no weights."""

import copy
import hashlib
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from configs.architecture import text_config
from configs.certificate import Certificate, Check, judged
from configs.load import ConfigError
from configs.schema import LearnerConfig, ModelConfig
from learner.certify.copies import compare_copies
from learner.certify.images import image_cases
from learner.certify.numbers import (
    LIMIT,
    attempt,
    coefficients,
    compare,
    distance,
    expected,
    gradients,
    judge_gradients,
)
from learner.certify.ranks import Answer, ComparedText, Pair, Sharing
from learner.certify.rows import Case, cases
from learner.model import loading
from learner.model.exactness import REMEDY, reasons
from learner.model.idle_parts import sees
from learner.model.microbatch import CopiedPrompts
from learner.model.policy import Policy
from learner.model.shrink import small, stir

OPTIONS = LearnerConfig(gather="pass", activation_checkpointing="none", head_chunk_tokens=64, compile=False)
ROOT = Path(__file__).parents[2]
CODE = ("configs", "learner")
SOFTWARE = ("torch", "transformers")
ADVICE = f"{REMEDY}; docs/models.md lists what holds"


def key_of(config: PreTrainedConfig, share: bool, trusted: bool, splits: bool = False, served: bool = True) -> str:
    """A digest of all that a certificate depends on."""
    digest = hashlib.sha256()
    facts = [config.to_dict(), share, trusted, splits, served, software(), platform.machine()]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for file in sorted(file for package in CODE for file in (ROOT / package).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def software() -> dict[str, str]:
    found = {}
    for name in SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def certify(
    model: ModelConfig, share: bool, mesh: DeviceMesh, pair: Pair, splits: bool = False, served: bool = True
) -> Certificate:
    """`splits`: ranks share rows. `served`: beside servers. Raises ConfigError for a config that transformers cannot
    read."""
    return certify_config(loading.read_config(model), model, share, mesh, pair, splits, served)


def certify_config(
    config: PreTrainedConfig,
    model: ModelConfig,
    share: bool,
    mesh: DeviceMesh,
    pair: Pair,
    splits: bool = False,
    served: bool = True,
) -> Certificate:
    started, trusted = time.perf_counter(), model.trust_remote_code
    made = Certificate(
        model=model.path,
        kind=config.model_type,
        key=key_of(config, share, trusted, splits, served),
        versions=software(),
        date=date.today().isoformat(),
        device=f"cpu {platform.machine()}",
    )
    if refused := reasons(copy.deepcopy(config), share, trusted, served):
        return made.model_copy(update={"refused": "; ".join(refused), "seconds": time.perf_counter() - started})
    with tempfile.TemporaryDirectory(prefix="headrace-certify-") as place:
        folder = Path(place)
        checks = attempt(
            "a small copy", lambda: examine(write_copy(config, model, folder), share, mesh, pair, folder, splits)
        )
        size = described(folder / "model")
    update = {"checks": tuple(checks), "copy_of": size, "seconds": time.perf_counter() - started}
    return made.model_copy(update=update | ({"remedy": ADVICE} if any(check.fault for check in checks) else {}))


def write_copy(config: PreTrainedConfig, model: ModelConfig, folder: Path) -> ModelConfig:
    """Write a small copy with random weights."""
    folder, trusted = folder / "model", model.trust_remote_code
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        little = small(config, trusted)
        built = loading.auto_class(little).from_config(little, dtype=torch.float32, trust_remote_code=trusted)
    stir(built)
    built.save_pretrained(folder)
    if trusted and Path(model.path).is_dir():
        for file in Path(model.path).glob("*.py"):
            shutil.copyfile(file, folder / file.name)
    return ModelConfig(path=str(folder), dtype="float32", trust_remote_code=trusted, text_alone=model.text_alone)


def described(folder: Path) -> str:
    """Example: `2 layers, 256 wide, 0.2 M parameters`."""
    if not (folder / "config.json").exists():
        return ""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = text_config(config)
    sizes = [
        f"{text[key]} {what}" for key, what in (("num_hidden_layers", "layers"), ("hidden_size", "wide")) if key in text
    ]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 4e6
    return ", ".join([*sizes, f"{size:.1f} M parameters"])


def examine(
    model: ModelConfig, share: bool, mesh: DeviceMesh, pair: Pair, folder: Path, splits: bool = False
) -> list[Check]:
    config, reference = loading.read_config(model), read_reference(model)
    try:
        policy = Policy(model, OPTIONS.model_copy(update={"share_prompts": share}), mesh)
    except ConfigError as error:
        return [Check(what="a policy of the learner", fault="; ".join(error.problems))]
    unshared = (policy.sharing.unshared or "") if share else "learner.share_prompts is off"
    pictured = list(image_cases(config)) if sees(config) else []
    every = [*cases(config.get_text_config().vocab_size), *pictured]
    checks: list[Check] = []
    for case in every:
        if case.shares and not policy.sharing.prompts:
            checks.append(Check(what=case.what, note=unshared))
        else:
            checks += compare(policy, reference, case)
    longest = next(case for case in every if len(case.texts) > 1 and "longer" in case.what)
    split = [longest, *(case for case in pictured if len(case.texts) > 1 and not case.shares)]
    for case in split:
        what = "images, two ranks = one" if case.seen else "two ranks = one"
        checks += attempt(what, partial(compare_ranks, what, model, reference, case, pair))
    for case in [longest, *(case for case in every if case.shares and policy.sharing.prompts)] if splits else []:
        checks += attempt(f"two ranks, one row: {case.what}", partial(compare_split, model, reference, case, pair))
    return checks + attempt(
        "copies of changed weights", lambda: compare_copies(policy, reference, model, split[-1], folder)
    )


def read_reference(model: ModelConfig) -> PreTrainedModel:
    """The copy with transformers' eager attention, without dropout."""
    reference: PreTrainedModel = loading.auto_class(loading.read_config(model)).from_pretrained(
        model.path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=model.trust_remote_code
    )
    reference.eval()
    return reference


def compare_ranks(what: str, model: ModelConfig, reference: PreTrainedModel, case: Case, pair: Pair) -> Sequence[Check]:
    """Compare what two ranks compute of half of the documents each, and their summed gradients."""
    weights = coefficients(case).numpy()
    ends = np.cumsum([len(text) - 1 for text in case.texts])[:-1]
    seen = case.seen or [()] * len(case.texts)
    documents = [ComparedText(*each) for each in zip(case.texts, np.split(weights, ends), seen, strict=True)]
    half = len(documents) // 2
    answers: list[Answer] = pair.ask(model, [documents[:half], documents[half:]])
    return _judged(what, reference, case, answers, [part for answer in answers for part in answer.logprobs])


def compare_split(model: ModelConfig, reference: PreTrainedModel, case: Case, pair: Pair) -> Sequence[Check]:
    """Compare what two ranks compute of a row that they share, each with half of its tokens."""
    row, ends = case.row, case.row.cu_seqlens[1:-1].tolist()
    pieces = np.split(row.tokens.numpy(), ends)
    scored = [int(each.sum()) for each in np.split(row.sampled.numpy(), ends)]
    weights = np.split(coefficients(case).numpy(), np.cumsum(scored)[:-1])
    documents = [ComparedText(*each) for each in zip(pieces, weights, strict=True)]
    sharing = Sharing(row.groups, isinstance(row.shared, CopiedPrompts))
    answers: list[Answer] = pair.ask(model, [documents, documents], sharing)
    return _judged(f"two ranks, one row: {case.what}", reference, case, answers, answers[1].logprobs)


def _judged(
    what: str, reference: PreTrainedModel, case: Case, answers: Sequence[Answer], logprobs: Sequence[np.ndarray]
) -> Sequence[Check]:
    names = (what, f"{what}, gradient")
    if error := next((answer.error for answer in answers if answer.error), ""):
        return [Check(what=names[0], fault=f"it cannot be computed ({error})")]
    if unmet := next((answer.unmet for answer in answers if answer.unmet), ""):
        return [Check(what=name, note=f"the two processes could not be used: {unmet}") for name in names]
    got = torch.from_numpy(np.concatenate(logprobs))
    with torch.no_grad():
        wanted = expected(reference, case)
    ours = {name: torch.from_numpy(grad) for name, grad in answers[0].gradients.items()}
    first = judged(names[0], distance(got, wanted), LIMIT, fault="two ranks compute other log-probabilities than one")
    return [first, judge_gradients(names[1], ours, gradients(reference, case), reference)]
