"""Compares copies of changed weights, pushed to servers and exported to disk."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from configs.certificate import Check, judged
from configs.schema import ModelConfig
from learner.certify.numbers import LIMIT, distance, expected
from learner.certify.rows import Case
from learner.model import loading
from learner.model.policy import Policy
from learner.model.shrink import UNMOVED
from learner.saved import export
from learner.weights.buckets import Buckets
from learner.weights.plan import Plan

BUCKET_BYTES = 1 << 20
CHANGE = 0.05
LEAST = 100 * LIMIT
"""Smaller changes of log-probabilities prove nothing."""


def compare_copies(
    policy: Policy, reference: PreTrainedModel, model: ModelConfig, case: Case, folder: Path
) -> list[Check]:
    """Change the policy's weights, and compare a server and a reader of the export."""
    change(policy)
    with torch.no_grad():
        ours = policy.score(policy.place(case.row), 1.0)[case.row.scored]
        moved = distance(ours, expected(reference, case))
    write_pushed(as_received(policy), model, folder / "pushed")
    export.write(export.collect(policy), model, folder / "exported")
    pushed, unsent = read_back(folder / "pushed", model)
    exported, unwritten = read_back(folder / "exported", model)
    still = "" if moved >= LEAST else "the change of its weights changes no log-probability"
    checks = []
    for what, copy, missing in (
        ("changed weights, pushed = learner", pushed, unsent),
        ("export, read back = learner", exported, unwritten),
    ):
        with torch.no_grad():
            apart = distance(expected(copy, case), ours)
        fault = missing or still
        checks.append(
            Check(what=what, figure=apart, limit=LIMIT, unit="nat", fault=fault)
            if fault
            else judged(what, apart, LIMIT, fault=f"it has other weights than the learner, {_differing(copy, policy)}")
        )
    return [*checks, _same(pushed, exported)]


@torch.no_grad()
def change(policy: Policy) -> None:
    draw = torch.Generator().manual_seed(2)
    for name, parameter in policy.model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.requires_grad and local.numel() and name.rpartition(".")[2] not in UNMOVED:
            local.add_(CHANGE * local.abs().max() * torch.randn(local.shape, generator=draw))


def as_received(policy: Policy) -> dict[str, Tensor]:
    """The weights as a server gets them in its buckets."""
    plan = Plan.of(policy.weight_specs(), BUCKET_BYTES, policy.frozen_names())
    buckets = Buckets(plan, policy.device)
    buckets.fill(policy.full_weights())
    return dict(buckets.views())


def write_pushed(weights: dict[str, Tensor], model: ModelConfig, folder: Path) -> None:
    """Write weights under their sent names, beside the model's other files."""
    folder.mkdir()
    for file in Path(model.path).iterdir():
        if file.is_file() and not file.name.endswith(export.WEIGHT_FILES):
            shutil.copyfile(file, folder / file.name)
    save_file(
        {name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def read_back(folder: Path, model: ModelConfig) -> tuple[PreTrainedModel, str]:
    """Load a folder. Also returns what it lacks or has besides."""
    config = loading.read_config(model.model_copy(update={"path": str(folder)}))
    read, info = loading.auto_class(config).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=model.trust_remote_code,
        output_loading_info=True,
    )
    for problem, key in (("does not have", "missing_keys"), ("has besides", "unexpected_keys")):
        if names := sorted(map(str, info.get(key) or ())):
            more = f" and {len(names) - 1} others" if len(names) > 1 else ""
            return read.eval(), f"it {problem} {names[0]}{more}"
    return read.eval(), ""


def _same(pushed: PreTrainedModel, exported: PreTrainedModel) -> Check:
    what = "weights pushed = loaded from disk"
    ours, theirs = pushed.state_dict(), exported.state_dict()
    other = [name for name, x in ours.items() if name not in theirs or not torch.equal(x, theirs[name])]
    return judged(what, float(len(other)), 0.0, "of its tensors", f"{', '.join(other[:3])} differ")


def _differing(copy: PreTrainedModel, policy: Policy) -> str:
    for name, x in copy.named_parameters():
        try:
            own = policy.model.get_parameter(name)
        except AttributeError:
            continue
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        if whole.shape != x.shape or not torch.allclose(whole, x):
            return f"such as {name} of its {type(copy.get_submodule(name.rpartition('.')[0])).__name__}"
    return "such as a buffer"
