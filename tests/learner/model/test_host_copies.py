"""Copies of a row's tensors, and `activation_checkpointing: offload`: the step of `block`, what it takes of GPU and
host, and when it is refused."""

from pathlib import Path

import pytest
import torch

from configs.load import ConfigError
from configs.schema import Config, LearnerConfig, ModelConfig
from learner.model.host_copies import in_one_copy
from learner.model.memory import GIB, check_host, estimate, host_bytes
from learner.train.batch import Batch
from tests.harness import world
from tests.harness.shapes_of_models import text_folder
from tests.harness.world import LEARNER, algorithm_of, cut, make_samples, policy_of, tiny_model

OFFLOAD = LearnerConfig(activation_checkpointing="offload", head_chunk_tokens=1024)


def test_tensors_of_all_kinds_travel_in_one_copy() -> None:
    given = [
        torch.arange(7),
        torch.tensor([True, False, True]),
        torch.zeros(0, dtype=torch.int32),
        torch.tensor(2.5),
        torch.arange(8)[::8],  # a stride of 8
        torch.zeros(0, dtype=torch.int64).as_strided((0,), (0,)),  # as NumPy returns where it finds nothing
        torch.arange(12, dtype=torch.float32).view(3, 4).t(),
        torch.arange(6, dtype=torch.bfloat16).view(1, 2, 3),
    ]
    copies = in_one_copy(given, torch.device("cpu"))
    assert [(x.dtype, x.shape) for x in copies] == [(x.dtype, x.shape) for x in given]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(copies, given, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in copies}) == 1
    assert in_one_copy([], torch.device("cpu")) == []


def test_on_the_cpu_it_is_block(tmp_path: Path, mesh) -> None:
    model, found = tiny_model(tmp_path), []
    for way in ("block", "offload"):
        policy = policy_of(model, mesh, LEARNER.model_copy(update={"activation_checkpointing": way}))
        batch = Batch.from_part(cut(make_samples(), 3, [24], 0), 64, policy.costs.quadratic)
        algorithm_of(policy, 64).backward(policy, batch)
        found.append(world.gradients(policy))
    block, offload = found
    assert block.keys() == offload.keys() and all(torch.equal(x, offload[name]) for name, x in block.items())


def test_inputs_of_blocks_are_counted_in_host_memory(tmp_path: Path) -> None:
    """7B, 131,072 tokens: 28 inputs of 940 MB, of which three stay on the GPU."""
    model, tokens = ModelConfig(path=str(text_folder(tmp_path, "7B"))), 131072
    width = 3584 * 2
    assert host_bytes(model, OFFLOAD, tokens) == 28 * tokens * width
    assert host_bytes(model, OFFLOAD.model_copy(update={"context_parallel": 4}), tokens) == 7 * tokens * width
    block = OFFLOAD.model_copy(update={"activation_checkpointing": "block"})
    assert host_bytes(model, block, tokens) == 0
    saved = estimate(model, block, 4).total(tokens) - estimate(model, OFFLOAD, 4).total(tokens)
    assert saved == 25 * tokens * width


def test_a_host_without_room_is_refused(tmp_path: Path) -> None:
    path = str(text_folder(tmp_path, "7B"))
    config = Config.model_validate(
        {"model": {"path": path}, "data": {"train": "d.parquet"}, "reward": {"function": "countdown"},
         "learner": {"activation_checkpointing": "offload", "ranks": 4}}
    )  # fmt: skip
    check_host(config, 131072, 4, 100 * GIB, 4)
    with pytest.raises(ConfigError) as error:
        check_host(config, 131072, 4, 90 * GIB, 4)
    (line,) = error.value.problems
    assert line == (
        "learner.activation_checkpointing: offload: 4 ranks would keep 98.0 GiB of inputs in host memory, and 90.0 GiB "
        "are free; lower learner.tokens_per_microbatch, raise learner.context_parallel, or set it to block"
    )
    blocked = config.learner.model_copy(update={"activation_checkpointing": "block"})
    check_host(config.model_copy(update={"learner": blocked}), 131072, 4, 0, 4)
