"""The compiler knows all sizes but numbers of tokens and documents; rotations have the bits of transformers' own."""

import importlib
import inspect
import pkgutil
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers.models
from functorch.compile import make_boxed_func
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_module_simplified

from learner.model import attention, compiling, microbatch
from learner.model.compiling import ROTATED, WIDTH, example, fits, rotate_tokens_first, tokens_first
from learner.model.host_copies import in_one_copy
from learner.model.kernels import joined
from learner.model.loading import blocks
from learner.train.batch import Batch
from tests.harness.pictured import form_of, make_pictured, seeing_model
from tests.harness.world import LEARNER, algorithm_of, cut, gradients, make_groups, policy_of, tiny_model

FAMILIES = {"qwen2": 1, "llama": 1, "glm4": 1, "gpt_oss": 1, "deepseek_v3": 2, "qwen2_5_vl": 1, "gemma4": 1, "gptj": 0}
"""By family: how many of its functions can rotate with tokens first."""


def rotations(family):
    """The functions of a family."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return [x for key, x in vars(module).items() if key.startswith("apply_") and "rotary_pos_emb" in key]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_and_gradients_are_the_same(family):
    functions = [function for function in rotations(family) if fits(function)]
    assert len(functions) == FAMILIES[family]
    for function in functions:
        found = []
        for rotate in (function, tokens_first(function)):
            width = WIDTH // 2 if family == "gpt_oss" else WIDTH
            given = example(rotate, width)
            leaves = [given[name].requires_grad_() for name in ROTATED if name in given]
            out = rotate(**given)
            out = (out,) if isinstance(out, torch.Tensor) else out
            found.append([*out, *torch.autograd.grad(sum((x * x).sum() for x in out), leaves)])
        assert all(map(torch.equal, *found)), function


@pytest.mark.long
def test_every_family_of_transformers_is_replaced_or_left_alone():
    """None is replaced by a function with other bits; those left alone have no argument for the order."""
    replaced = 0
    for package in pkgutil.iter_modules(transformers.models.__path__):
        try:
            functions = rotations(package.name)
        except (ImportError, RuntimeError):
            continue  # it has no such file, or wants a package that is not installed
        for function in functions:
            given = inspect.signature(function).parameters
            replaced += fits(function)
            assert fits(function) or "unsqueeze_dim" not in given or "v" in given, function
    assert replaced > 100


def test_the_compiler_sees_one_graph():
    (function,) = rotations("qwen2")
    given = example(function, WIDTH)
    compiled = torch.compile(tokens_first(function), fullgraph=True, dynamic=True, backend="eager")
    for theirs, ours in zip(function(**given), compiled(**given), strict=True):
        assert torch.equal(theirs, ours)


def test_another_order_is_left_alone():
    (function,) = rotations("qwen2")
    given = example(function, WIDTH)
    heads = {name: x.transpose(1, 2) if name in ROTATED else x for name, x in given.items()}
    theirs, ours = (rotate(**heads, unsqueeze_dim=2) for rotate in (function, tokens_first(function)))
    assert all(map(torch.equal, theirs, ours))
    positional = [heads[name] for name in ("q", "k", "cos", "sin")]
    assert all(map(torch.equal, theirs, tokens_first(function)(*positional, 2)))


def wrong(q, k, cos, sin, unsqueeze_dim=1):
    """Rolls along the tokens, wherever these are."""
    return (q * cos.unsqueeze(unsqueeze_dim)).roll(1, 2), k


def test_a_function_that_depends_on_the_order_is_left_alone(monkeypatch):
    module = types.ModuleType("modeling_wrong")
    module.apply_rotary_pos_emb = wrong
    monkeypatch.setitem(compiling.sys.modules, "modeling_wrong", module)
    layer = type("Wrong", (torch.nn.Module,), {"__module__": "modeling_wrong"})()
    rotate_tokens_first(layer)
    assert module.apply_rotary_pos_emb is wrong
    (module.apply_rotary_pos_emb,) = rotations("qwen2")
    rotate_tokens_first(layer)
    replaced = module.apply_rotary_pos_emb
    assert replaced.__wrapped__
    rotate_tokens_first(layer)
    assert module.apply_rotary_pos_emb is replaced


def test_some_compiled_blocks_recompute(tmp_path: Path, mesh, monkeypatch) -> None:
    """Both kinds of block run the same compiled code; gradients are those of blocks that keep everything."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model, found = tiny_model(tmp_path), []
    for way in ("none", 1):
        policy = policy_of(model, mesh, LEARNER.model_copy(update={"compile": True, "activation_checkpointing": way}))
        entries = make_groups()
        batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), 10**6, share_prompts=True)
        algorithm_of(policy, 200).backward(policy, batch)
        found.append(gradients(policy))
        assert [getattr(block, "gradient_checkpointing", None) for block in blocks(policy.model)] == [way == 1, False]
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_rows_with_and_without_images_run_the_same_code(tmp_path: Path, mesh, monkeypatch, kind: str) -> None:
    """The tower's blocks are compiled once, those of the text twice: for shared prompts and without. No row or block
    adds to it: with one image, several or none, the first of a stack or a later one."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(attention, "sdpa", as_on_gpus)
    monkeypatch.setattr(microbatch, "sent", sent_as_to_gpus)
    torch._dynamo.reset()
    counters.clear()
    model = seeing_model(tmp_path, kind)
    policy = policy_of(model, mesh, LEARNER.model_copy(update={"compile": True, "activation_checkpointing": "none"}))
    form = form_of(model)
    rows, step = [], algorithm_of(policy, 60, form=form)
    for version, budget in ((3, 60), (4, 200)):
        part = make_pictured(form, version).part(version, [15], 0)
        batch = Batch.from_part(part, budget, policy.costs.quadratic, True, form, policy.costs.patch_cost)
        step.backward(policy, batch)
        rows += batch.microbatches
    seen = {(row.images is not None and len(row.images.grid), row.shared is not None) for row in rows}
    assert {images for images, _ in seen} >= {False, 1, 2} and {shared for _, shared in seen} == {False, True}
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]


def as_on_gpus(q, k, v, starts, longest, causal, scale, window):
    """One operator, where a CPU has torch's attention, which breaks the graph."""
    return joined.attention(q, k, v, starts, longest, None, (causal, scale, window, "plain"), None, None)


def sent_as_to_gpus(row, device):
    """All tensors in one buffer, where a CPU gets each by itself."""
    tensors = []
    row.mapped(lambda x: tensors.append(x) or x)
    there = iter(in_one_copy(tensors, device))
    return row.mapped(lambda _: next(there))


@pytest.mark.long
def test_no_size_is_a_quotient_of_unknown_ones(tmp_path: Path, mesh, monkeypatch) -> None:
    """A head_dim that is not known makes sizes such as `64 // (64 // s0)`, and each index a division."""
    shapes: list[str] = []

    def note(graph, _):
        values = [node.meta.get("val") for node in graph.graph.nodes]
        shapes.extend(str(size) for value in values if isinstance(value, torch.Tensor) for size in value.shape)
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        return aot_module_simplified(graph, inputs, fw_compiler=note, bw_compiler=note)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    policy = policy_of(tiny_model(tmp_path), mesh, LEARNER.model_copy(update={"compile": True}))
    entries = make_groups()
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), 10**6, share_prompts=True)
    assert batch.microbatches[0].shared is not None  # other rows break the graph on a CPU
    algorithm_of(policy, 200).backward(policy, batch)
    assert any(size.startswith("s") for size in shapes), "numbers of tokens are known"
    assert not [size for size in shapes if "//" in size]
