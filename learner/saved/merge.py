"""`python -m learner merge CHECKPOINT OUT`: writes the whole weights of a checkpoint with an adapter as a Hugging Face
folder.

Computes on the CPU, in float32, and rounds once, to `model.dtype`. Exit 1: a full disk, 2: bad input.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from configs.architecture import PROVEN
from configs.checkpoint_files import fault
from configs.entrypoint import DONE, CommandParser, code_of
from configs.plain_text import print_visible
from configs.variables import can_write
from configs.writing import draft_of, removed_on_failure, writing
from learner.model.file_form import FileForm
from learner.model.loading import persistent_buffers, read_base
from learner.model.lora.base import digest
from learner.saved import adapter_files, export
from learner.saved.manifest import adapter_of
from learner.weights.plan import LORA_A, LORA_B

PROG = "python -m learner merge"


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    description = "Write the whole weights of a checkpoint with an adapter."
    parser = CommandParser(PROG, description=description)
    parser.add_argument("checkpoint", type=Path, help="as runs/NAME/checkpoints/v000100")
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
    given = parser.parse_args(argv)
    try:
        merge(given.checkpoint, given.out)
    except (ValueError, OSError) as error:
        print_visible(f"{PROG}: {str(error).splitlines()[0]}", sys.stderr)
        return code_of(error)
    print_visible(f"vllm serve {given.out}")
    return DONE


def merge(checkpoint: Path, out: Path) -> None:
    """Write the whole model as `out`, or nothing. Raises ValueError or OSError."""
    if out.exists():
        raise ValueError(f"{out}: exists already; name a folder that does not")
    place = next(folder for folder in out.absolute().parents if folder.exists())
    if not can_write(place):  # known before minutes of work
        raise ValueError(f"{out}: {place} cannot be written to; name another folder")
    if why := fault(checkpoint):
        raise ValueError(f"{checkpoint}: is no complete checkpoint: {why}")
    if (adapter := adapter_of(checkpoint)) is None:
        raise ValueError(f"{checkpoint}: has no adapter to merge: its weights are whole, in {checkpoint}/huggingface")
    path, lora = adapter.model.path, adapter.model.lora
    assert lora is not None
    model = read_base(adapter.model)
    if digest(model) != adapter.base:
        raise ValueError(f"model.path: {path} has other weights than when {checkpoint} was saved; give them back")
    add(model, adapter_files.read(checkpoint / "adapter"), lora.scale)
    draft = draft_of(out)
    with writing(out), removed_on_failure(draft):
        export.write(dict(_in_files(model)), adapter.model, draft)
        draft.rename(out)


def _in_files(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers as the model's files hold and name them."""
    form, proven = FileForm(model), model.config.model_type in PROVEN
    for name, whole in [*model.named_parameters(), *persistent_buffers(model)]:
        for held, part in form.tensors(name, whole):
            for key, tensor in export.in_files(held, part) if proven else [(held, part)]:
                yield key, tensor if tensor is whole else tensor.clone()  # views of one tensor cannot be written


def add(model: PreTrainedModel, adapter: dict[str, Tensor], scale: float) -> None:
    """Add `adapter` to the layers of `model`, rounded once to their dtype."""
    for name in adapter:
        if name.endswith(LORA_A):
            layer = name.removesuffix(LORA_A)
            weight = model.get_parameter(f"{layer}.weight")
            weight.copy_(weight.float() + scale * (adapter[layer + LORA_B] @ adapter[name]))
