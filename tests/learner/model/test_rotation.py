"""Rotations with tokens before heads give the bits of transformers' own."""

import importlib
import inspect
import pkgutil
import types

import pytest
import torch
import transformers.models

from learner.model import rotation
from learner.model.rotation import ROTATED, WIDTH, example, fits, rotate_tokens_first, tokens_first

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
    monkeypatch.setitem(rotation.sys.modules, "modeling_wrong", module)
    layer = type("Wrong", (torch.nn.Module,), {"__module__": "modeling_wrong"})()
    rotate_tokens_first(layer)
    assert module.apply_rotary_pos_emb is wrong
    (module.apply_rotary_pos_emb,) = rotations("qwen2")
    rotate_tokens_first(layer)
    replaced = module.apply_rotary_pos_emb
    assert replaced.__wrapped__
    rotate_tokens_first(layer)
    assert module.apply_rotary_pos_emb is replaced
