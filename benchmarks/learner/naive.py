"""The case `naive`: the same model in plain transformers, padded, with all logits, in the largest microbatches that
fit.

FSDP2, precision and optimizer are as in `ours`; gradient checkpointing is on, because it does not fit without. Run by
`benchmarks.learner`, once on each rank of a case; waits for the other ranks.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from benchmarks.learner.cases import LONGEST, PROMPT, Case, documents
from configs.schema import ModelConfig
from learner.model import loading
from learner.model.flops import Costs


def run(case: Case, folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """One step over `case.samples` of the batch."""
    gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    model, costs = sharded(folder, mesh, device)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    made = documents(512, 2, model.config.vocab_size)[: case.samples]
    texts = [torch.from_numpy(sample.tokens.numpy().astype(np.int64)) for sample in made]
    mine = texts[mesh.get_rank() :: mesh.size()]
    size = largest(model, adamw, min(len(mine), 4), device)
    synchronize(gpu)
    start = time.perf_counter()
    for at in range(0, len(mine), size):
        backward(model, mine[at : at + size], device)
    norm = clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    assert torch.isfinite(norm)
    synchronize(gpu)
    seconds, lengths = time.perf_counter() - start, [len(text) for text in texts]
    tokens, trainable = sum(lengths), sum(n - min(PROMPT, n // 2) for n in lengths)
    flops = costs.total(tokens, trainable, sum(n * n for n in lengths))
    answer = {"seconds": seconds, "tokens_per_s": tokens / seconds, "microbatch_samples": size}
    return answer | {"flops_per_s": flops / seconds / mesh.size(), "tokens": tokens}


def sharded(folder: Path, mesh: DeviceMesh, device: torch.device) -> tuple[PreTrainedModel, Costs]:
    """The model with random weights, under FSDP2; and its FLOPs per token."""
    model = loading.build_on_meta(ModelConfig(path=str(folder)), "sdpa")
    costs = Costs.of(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in loading.blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    loading.init_random(model, device, mesh.size())
    return model, costs


def backward(model: PreTrainedModel, rows: list[Tensor], device: torch.device) -> None:
    """Padded rows, all logits."""
    ids = pad_sequence(rows, batch_first=True).to(device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    (-(logprobs * mask[:, 1:]).sum() / 1e5).backward()


def largest(model: PreTrainedModel, adamw: torch.optim.AdamW, size: int, device: torch.device) -> int:
    """Halve `size` (8 never fitted) until that many of the longest samples fit on every rank."""
    while True:
        full = torch.zeros(1, device=device)
        try:
            backward(model, [torch.zeros(LONGEST, dtype=torch.int64)] * size, device)
        except torch.OutOfMemoryError:
            full += 1
        adamw.zero_grad()
        dist.all_reduce(full)
        if not full or size == 1:
            return size
        size //= 2
        torch.cuda.empty_cache()


def synchronize(gpu: bool) -> None:
    """Wait for all ranks, and for all work on the GPU."""
    dist.barrier()
    if gpu:
        torch.cuda.synchronize()
