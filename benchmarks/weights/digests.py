"""What the servers of `benchmarks.weights` report of their workers: a digest of all parameters, and the GPU memory.

A worker extension for `worker_extension_cls`: `benchmarks.weights.digests.DigestingWorker`. Two cases whose learners
have as many ranks publish the same weights, so their workers' digests are equal, however the weights were sent and
staged.
"""

from typing import Any

import torch

from learner.weights.buckets import checksum
from rollout.engine.worker import WorkerExtension

MODULUS = (1 << 31) - 1


class DigestingWorker(WorkerExtension):
    """A worker that also answers `rl_digest`."""

    def rl_digest(self) -> dict[str, Any]:
        """This worker's staging mode, a digest of its parameters, and the bytes that torch has allocated."""
        digest = 0
        for _, parameter in self.model_runner.get_model().named_parameters():
            words = parameter.detach().contiguous().view(-1).view(torch.uint8)
            digest = (31 * digest + int(checksum(words))) % MODULUS
        allocated = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        mode = self.rl_staging.mode if self.rl_staging else ""
        return {"digest": digest, "allocated": allocated, "staging": mode}
