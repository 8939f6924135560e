"""A learner that trains on nothing: `python -m benchmarks.runs.stand_in RUN_FILE [EVERY_S MEAN SPREAD RUNNING]`.

It takes each batch as soon as there is one, notes it in `batches.jsonl` of the run's folder (`before`: of each sampled
token, how many were sampled before it, summed), says that it is trained, and publishes real weights by the real wire:
the newest version, at most every EVERY_S seconds. Under these weights an answer ends with probability 1 / MEAN at each
token, never for 0 (`benchmarks/weights/known.py`). With SPREAD above 0 it is 1 / SPREAD until RUNNING samples have
come: answers of one length would otherwise begin and end together for ever.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.weights.known import end_answers
from benchmarks.weights.shapes import END
from buffer.curve import client_keys_for
from buffer.keys import load_server_keys
from buffer.wire.client import LearnerClient
from configs.inner_command import inner_words
from configs.load import load
from configs.resume import fingerprint
from learner.model.policy import Policy
from learner.weights.sender.publish import Sender


def main(file: str, every_s: float = 2.0, mean: float = 0.0, spread: float = 0.0, running: float = 0.0) -> None:
    """Run until killed."""
    config, gpu = load([file]), torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda" if gpu else "cpu", (1,))
    policy = Policy(config.model, config.learner, mesh, random=True)
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    end_answers(policy.model.named_parameters(), END, vocabulary, spread or mean)
    keys = client_keys_for(config.buffer.address, config.run.path, "learner")
    own = load_server_keys(keys.folder, "learner")
    wire = Sender(policy.weight_specs(), config.weights, 0, policy.device, keys=own)
    batches = LearnerClient(config.buffer.address, "learner-0", fingerprint(config), 0, 1, wire.address, keys=keys)
    batches.rewind(0)
    wire.publish(policy, 0)
    published, version, seen = time.monotonic(), 0, 0
    with (config.run.path / "batches.jsonl").open("a") as log:
        while (part := batches.take(version)) is not None:
            lengths, samples = part.rows.sampled.numpy(), int(part.rows.item.shape[0])
            tokens, before = int(lengths.sum()), int((lengths * (lengths - 1)).sum()) // 2
            steady, seen = not spread, seen + samples
            line = {"version": version, "at": time.monotonic(), "tokens": tokens, "before": before}
            log.write(json.dumps(line | {"samples": samples, "steady": steady}) + "\n")
            log.flush()
            batches.trained(version, version)
            version += 1
            if spread and seen >= running:
                end_answers(policy.model.named_parameters(), END, vocabulary, mean)
                spread = published = 0.0
            if time.monotonic() - published >= every_s:
                wire.publish(policy, version)
                published = time.monotonic()


if __name__ == "__main__":
    inner_words("RUN_FILE", optional=("EVERY_S", "MEAN", "SPREAD", "RUNNING"))
    main(sys.argv[1], *map(float, sys.argv[2:]))
    os._exit(0)
