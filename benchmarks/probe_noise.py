"""By how much do rounding, and logits that one end computes otherwise, change the texts of the probe?

`python -m benchmarks.probe_noise --model FOLDER` takes about a minute on a CPU for SmolLM2-135M. It computes the model
with transformers in float32, once as it is, once with the outputs of all modules rounded to bfloat16, and once with the
linear layers of the blocks in FP8 besides: weights scaled by row, inputs by token. The faults are a softcap of the
learner that a server leaves out, and logits times 0.9. Each is compared with the limits in bfloat16 of
`learner/weights/prober.py`. Prints one table; writes JSON.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.weights.table import ResultRow, write
from configs.schema import WeightsConfig
from learner.weights.probe import ROUNDING, PolicyText, texts_of
from learner.weights.prober import limits_of

FP8, LARGEST = torch.float8_e4m3fn, 448.0
SOFTCAPS, SCALE = (30.0, 50.0), 0.9
Change = Callable[[Tensor], Tensor]


def rounded(output: Any) -> Any:
    """The tensors of a module's output as numbers of bfloat16."""
    if isinstance(output, tuple):
        return tuple(rounded(each) for each in output)
    return output.bfloat16().float() if isinstance(output, Tensor) and output.is_floating_point() else output


def quantised(values: Tensor) -> Tensor:
    """Numbers of FP8, with one scale for each row."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (values / scale).to(FP8).float() * scale


def round_outputs(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name and "rotary" not in name:
            module.register_forward_hook(lambda module, given, output: rounded(output))


def quantise(model: Any) -> None:
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = quantised(module.weight.data)
            module.register_forward_pre_hook(lambda module, given: (quantised(given[0]),))


@torch.no_grad()
def logits_of(model: Any, text: PolicyText) -> Tensor:
    """Logits for the tokens that are compared: [compared, words]."""
    logits: Tensor = model(torch.tensor([text.tokens])).logits[0, -text.compared - 1 : -1]
    return logits


def logprobs(logits: Tensor, text: PolicyText) -> Tensor:
    targets = torch.tensor(text.tokens[-text.compared :])
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def softcap(limit: float) -> Change:
    return lambda logits: limit * torch.tanh(logits / limit)


def rows_of(model: Any, texts: list[PolicyText]) -> list[ResultRow]:
    """The model's modules are changed."""
    exact = {text.name: logits_of(model, text) for text in texts}
    pairs = [(f"a softcap of {each:g} left out", exact, softcap(each)) for each in SOFTCAPS]
    faults = [
        row for what, found, change in pairs for text in texts for row in compared(what, text, found, exact, change)
    ]
    scaled = {name: SCALE * logits for name, logits in exact.items()}
    faults += [row for text in texts for row in compared(f"logits times {SCALE:g}", text, scaled, exact)]
    rounding = list[ResultRow]()
    for what, apply in (("bfloat16", round_outputs), ("FP8", quantise)):
        apply(model)
        found = {text.name: logits_of(model, text) for text in texts}
        rounding += [row for text in texts for row in compared(what, text, found, exact)]
    return rounding + faults


def compared(
    what: str, text: PolicyText, theirs: dict[str, Tensor], ours: dict[str, Tensor], change: Change = lambda x: x
) -> list[ResultRow]:
    """The two differences of a server's logits from the learner's, which `change` makes from `ours`."""
    learner = logprobs(change(ours[text.name]), text)
    differences = logprobs(theirs[text.name], text) - learner
    limits = limits_of(WeightsConfig(), learner.tolist(), ROUNDING, text.likely)
    size = f"{text.name} ({float(learner.mean()):.2f} in the mean)"
    return [
        ResultRow(
            f"mean absolute difference on {size}", float(differences.abs().mean()), "nat", "limit", limits[0], what
        ),
        ResultRow(f"mean difference on {size}", float(differences.mean()), "nat", "limit", limits[1], what),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "probe-noise.json")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = texts_of(tokenizer, 4096, model.get_input_embeddings().weight.shape[0])
    write(args.out, "probe_noise", [row.line() for row in rows_of(model, texts)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
