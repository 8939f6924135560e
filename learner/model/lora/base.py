"""The model beneath an adapter, as reference of the KL term, and as what a checkpoint belongs to.

Both uses are collectives of the ranks that share a copy of the model.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from learner.mesh import replica
from learner.model.lora.adapter import without_adapter
from learner.model.microbatch import Microbatch
from learner.model.policy import Policy


class Base:
    """A reference model that takes no memory."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def score(self, microbatch: Microbatch) -> Tensor:
        with without_adapter(self.policy.model):
            return self.policy.score(microbatch)


def digest(model: nn.Module, mesh: DeviceMesh | None = None) -> str:
    """Digest of the frozen weights, however they are sharded."""
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    sums = torch.stack([_word_sum(p) for _, p in frozen])
    if mesh is not None:
        sums = sums if replica(mesh) == 0 else torch.zeros_like(sums)
        dist.all_reduce(sums)
    rows = zip(frozen, sums.tolist(), strict=True)
    text = "".join(f"{name} {tuple(p.shape)} {p.dtype} {total}\n" for (name, p), total in rows)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _word_sum(parameter: Tensor) -> Tensor:
    local = parameter.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    words = local.view(torch.int16 if local.element_size() == 2 else torch.int32)
    return words.sum(dtype=torch.int64).cpu()
