"""By how much does bfloat16 alone change the log-probabilities of a random model?

`python -m benchmarks.weights_noise` takes three minutes on two CPU cores. It has the shapes, the random weights and the
random probe tokens of `benchmarks.weights`, and compares transformers in bfloat16 with transformers in float32 on the
same weights, block by block. Two correct implementations cannot agree much better than that, so it is the limit for the
probe of that benchmark. Prints one table; writes JSON.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from benchmarks.weights.shapes import COMMON, SHAPES
from benchmarks.weights.table import ResultRow, write
from learner.weights.probe import PROBE_TOKENS

BF16 = torch.bfloat16


@torch.no_grad()
def noise(shape: str, seed: int) -> tuple[float, float]:
    """Mean absolute difference of the log-probabilities, in nat, and standard deviation of the logits."""
    keys: dict[str, Any] = COMMON | SHAPES[shape] | {"attn_implementation": "sdpa"}
    config = Qwen2Config(**keys)
    torch.manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (PROBE_TOKENS,))
    embedding = random_matrix(config.vocab_size, config.hidden_size, config)
    head = embedding if config.tie_word_embeddings else random_matrix(config.vocab_size, config.hidden_size, config)
    rotary = Qwen2RotaryEmbedding(config)
    exact, rounded = Qwen2DecoderLayer(config, 0), Qwen2DecoderLayer(config, 0).to(BF16)
    hidden = {exact: embedding[tokens][None].float(), rounded: embedding[tokens][None]}
    del embedding
    for _ in range(config.num_hidden_layers):
        randomize(exact, config)
        rounded.load_state_dict(exact.state_dict())
        for block in hidden:
            cos_sin = rotary(hidden[block], torch.arange(PROBE_TOKENS)[None])
            hidden[block] = block(hidden[block], position_embeddings=cos_sin, attention_mask=None)
    logits = [rms_norm(x).to(x.dtype).float() @ head.float().T for x in hidden.values()]
    a, b = (x[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None]) for x in logits)
    return float((a - b).abs().mean()), float(logits[0].std())


def random_matrix(rows: int, columns: int, config: Any) -> Tensor:
    """A matrix like those of `init_random` in learner/model/loading.py, rounded to bfloat16."""
    return torch.empty(rows, columns).normal_(0.0, config.initializer_range).to(BF16)


def randomize(block: torch.nn.Module, config: Any) -> None:
    """Fill `block` with random weights that bfloat16 represents exactly."""
    for name, parameter in block.named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(random_matrix(parameter.shape[0], parameter.shape[1], config))
        else:
            parameter.fill_("norm" in name)


def rms_norm(hidden: Tensor) -> Tensor:
    """The last norm with weight 1, in float32."""
    return hidden.float() * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + 1e-6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="Qwen2.5-1.5B,Qwen2.5-7B")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "weights-noise.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in args.shapes.split(","):
        difference, spread = noise(shape, args.seed)
        what = f"{shape}: bfloat16 against float32, mean difference of log-probabilities"
        rows.append(ResultRow(what, difference, "nat", "standard deviation of the logits", spread).line())
    write(args.out, "weights_noise", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
