"""Checks before training that packed rows are computed exactly.

A small copy with random weights must give packed documents and answers to a shared prompt the log-probabilities that
transformers gives each document alone.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from configs.architecture import PROVEN, unsupported
from configs.load import ConfigError
from configs.schema import ModelConfig
from learner.model import attention, idle_parts, loading, state, vision
from learner.model.epilogue import Epilogue
from learner.model.experts.mixture import Mixture, has_expert_layers, has_experts
from learner.model.file_form import FileForm
from learner.model.flops import Costs
from learner.model.forest import Text, lay_out_forest
from learner.model.head import HeadOptions
from learner.model.microbatch import Microbatch, lay_out
from learner.model.policy import apply_head, hidden_states
from learner.model.shrink import LARGEST, VOCABULARY, WINDOW, size_of, small, stir

TOLERANCE = 1e-3
"""In nats. An exact model differs by 1e-5."""
FAR = 10**7
TRIED = attention.registered("sdpa") + "_tried"
"""Checks the masks that transformers would make."""
WINDOWED = "_headrace_windowed"
"""Whether an attention was given a window."""
LENGTHS = (5, 2 * WINDOW + 5, 10, 9)
"""The second exceeds any window; layers with a state compute the last two together."""
ANSWERS = (4, 1, 6)
FOREIGN = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, RuntimeError),
    *(StrictDataclassError, TypeError, ValueError),
)
"""What unusable models raise."""
REMEDY = "take a model of a type that is trained exactly, such as qwen2, qwen3, llama or mistral"
OPTIONS = HeadOptions(1.0, 64, False)
NO_IMAGES: Mapping[str, Tensor] = MappingProxyType({})


class Inexact(ValueError):
    """The text is a clause about the difference."""


class ServedOtherwise(Inexact):
    """vLLM would compute something else than transformers."""


def check_exact(model: ModelConfig, share: bool, served: bool = True) -> None:
    """Raise ConfigError unless packed rows are computed exactly, and if `served`, by servers too."""
    config = loading.read_config(model)
    kind = config.model_type
    if found := reasons(config, share, model.trust_remote_code, served):
        raise ConfigError([f"model.path: {model.path} ({kind}): {reason}" for reason in found])
    check_adapter(model, config)


def check_in_own_process(model: ModelConfig, share: bool, ranks: int) -> None:
    """Run both checks in a process that trains nothing."""
    state.use_torch_alone()
    check_exact(model, share)
    check_shareable(model, ranks)


def check_adapter(model: ModelConfig, config: PreTrainedConfig) -> None:
    """Raise ConfigError if `model.lora` does not fit the model."""
    if model.lora and (problem := _no_adapter(config, model.trust_remote_code)):
        kind = config.model_type
        raise ConfigError([f"model.lora: {model.path} ({kind}) {problem}; set it to null"])


def check_shareable(model: ModelConfig, ranks: int) -> None:
    if ranks == 1:
        return
    config = loading.read_config(model)
    if problem := _not_shareable(config, model.trust_remote_code):
        kind = config.get_text_config().model_type
        raise ConfigError([f"learner.context_parallel: {ranks}, but {model.path} ({kind}) {problem}; set it to 1"])


def reasons(config: PreTrainedConfig, share: bool = True, trusted: bool = False, served: bool = True) -> list[str]:
    """Why the model would not be trained exactly. `served`: beside servers."""
    if found := list(unsupported(config.to_dict(), served)):
        return found
    try:
        try_out(config, share, trusted)
    except ServedOtherwise as error:
        return [f"servers would compute other log-probabilities than the learner: {error}"]
    except Inexact as error:
        return [f"it would be trained wrongly: {error}; {REMEDY}"]
    return []


def _no_adapter(config: PreTrainedConfig, trusted: bool) -> str | None:
    if idle_parts.nests_text(config) and not idle_parts.sees(config):
        return "is a multimodal model that is trained on text alone, of which no server was seen to take an adapter"
    if config.model_type in PROVEN:
        return None
    empty = loading.build(copy.deepcopy(config), TRIED, torch.device("meta"), trusted)
    if has_expert_layers(empty):
        return "has experts of a type beside which no server was seen to take an adapter"
    if kept := state.kinds(empty):
        return f"has layers that keep a state ({', '.join(kept)}), of which no server was seen to take an adapter"
    if changed := list(FileForm(empty).changed):
        return f"has weights that its files name otherwise ({changed[0]}), and an adapter would not fit them"
    return None


def _not_shareable(config: PreTrainedConfig, trusted: bool) -> str | None:
    if idle_parts.sees(config):
        return "reads images, whose tokens are not split over ranks"
    if idle_parts.nests_text(config):
        return "is a multimodal model that is trained on text alone, of which no rows were split over ranks"
    kept = state.kinds(loading.build(copy.deepcopy(config), TRIED, torch.device("meta"), trusted))
    return f"has layers that keep a state ({', '.join(kept)}), which ranks do not exchange" if kept else None


def try_out(config: PreTrainedConfig, share: bool, trusted: bool) -> None:
    """Raise Inexact if a small copy is not computed exactly."""
    _require_blocks(_empty(config, trusted))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs, ours = _built(config, trusted)
    _require_blocks(ours)
    _check_structure(ours)
    with torch.no_grad():
        _compare(theirs, ours, share)
    _check_windows(ours)


def _check_windows(model: PreTrainedModel) -> None:
    """Raise ServedOtherwise if vLLM would give other layers a window than transformers does: all, or those that
    `layer_types` names. No probe is longer than a usual window."""
    text: Any = model.config.get_text_config()
    window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    for number, block in enumerate(loading.blocks(model)):
        ours = [vars(layer)[WINDOWED] for layer in block.modules() if WINDOWED in vars(layer)]
        served = bool(window) and (types is None or types[number] == "sliding_attention")
        if window and ours and any(ours) != served:
            problem = "sliding_window and layer_types in its config.json are not those by which its type computes"
            remedy = "set sliding_window to null" if served else "remove layer_types"
            raise ServedOtherwise(f"{problem}, and vLLM goes by them; {remedy}")


def _built(config: PreTrainedConfig, trusted: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    try:
        little = small(config, trusted)
        if (size := size_of(little, trusted)) > LARGEST:
            raise Inexact(f"it cannot be tried, because its small copy has {size:,} parameters")
        cpu = torch.device("cpu")
        theirs = loading.auto_class(little).from_config(
            copy.deepcopy(little), dtype=torch.float32, attn_implementation="eager", trust_remote_code=trusted
        )
        ours = loading.build(little, TRIED, cpu, trusted)
        if type(ours.config) is not type(little):
            raise Inexact(f"only its {type(ours).__name__} would be trained, which is only a part of the model")
    except Inexact:
        raise
    except FOREIGN as error:
        raise Inexact(f"it cannot be built with the learner's attention ({named(error)})") from error
    stir(theirs)
    ours.load_state_dict(theirs.state_dict())
    return theirs.eval(), ours


def _judge_mask(mask_function: Callable[..., Tensor], q_length: int, **given: Any) -> None:
    """Refuse a mask that only hides parts of very long documents, which short trials cannot show."""
    if q_length == LENGTHS[1]:  # one document alone: mask functions of packed rows take no other positions
        zero, first = torch.tensor(0), torch.tensor(0)
        near, far = (bool(mask_function(zero, zero, torch.tensor(at), first)) for at in (q_length - 1, FAR))
        if near and not far:
            raise Inexact("its attention sees only part of a long document, by a length that a small copy cannot try")


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    vars(module)[WINDOWED] = kwargs.get("sliding_window") is not None
    return attention.ATTENTIONS["sdpa"](module, *args, **kwargs)


AttentionInterface.register(TRIED, _attend)
AttentionMaskInterface.register(TRIED, _judge_mask)


def _empty(config: PreTrainedConfig, trusted: bool) -> PreTrainedModel | None:
    """The whole model without weights; None if it cannot be built, which `_built` names."""
    try:
        return loading.build(copy.deepcopy(config), TRIED, torch.device("meta"), trusted)
    except FOREIGN:
        return None


def _require_blocks(model: PreTrainedModel | None) -> None:
    """Raise Inexact if the model has no list of blocks. The whole model is judged first, because a small copy of RWKV,
    which has none, takes minutes to get its first weights."""
    if model is not None and not loading.has_blocks(model):
        raise Inexact(f"{type(model).__name__} has no decoder.layers, where the learner looks for its blocks")


def _check_structure(model: PreTrainedModel) -> None:
    """Find faults that no comparison of log-probabilities shows."""
    try:
        joined = FileForm(model).joined
    except FOREIGN as error:
        raise Inexact(f"the form of its files is not that of its weights one by one ({named(error)})") from error
    if joined:
        raise Inexact(f"its files hold several of its weights as one, {joined}, and the learner sends each alone")
    blocks_of: dict[nn.Parameter, int] = {}
    for number, block in enumerate(loading.blocks(model)):
        if any(blocks_of.setdefault(parameter, number) != number for parameter in block.parameters()):
            raise Inexact(f"its {type(block).__name__} shares weights with another block, and blocks are sharded alone")
    for name, module in model.named_modules():
        rates = {key: x for key, x in vars(module).items() if isinstance(x, float) and ("drop" in key or key == "p")}
        if dropping := next((key for key, x in rates.items() if x and ("drop" in f"{key} {type(module)}".lower())), ""):
            raise Inexact(f"its dropout cannot be switched off ({name}.{dropping}: {rates[dropping]:g})")
        if "expert" in f"{name} {type(module).__name__}".lower() and not has_experts(model.config):
            raise Inexact(f"it has experts ({name}) that its config does not count")


def _compare(theirs: PreTrainedModel, ours: PreTrainedModel, share: bool) -> None:
    draw = np.random.default_rng(0)
    documents = [draw.integers(2, VOCABULARY, length) for length in LENGTHS]
    prompt, answers = documents[-1], [draw.integers(2, VOCABULARY, length) for length in ANSWERS]
    cases = [
        ("a document", packed_row(documents[1:2]), documents[1:2], 1),
        ("packed documents", packed_row(documents), documents, 1),
    ]
    if share and attention.why_unshared(ours.config, "sdpa", torch.device("cpu"), state.kinds(ours)) is None:
        row = packed_row([prompt, *answers], [len(answers)])
        whole = [np.concatenate([prompt, each]) for each in answers]
        cases += [(name, each, whole, len(prompt)) for name, each in _shared(row)]
    if share and attention.why_no_trees(ours.config, "sdpa", torch.device("cpu"), state.kinds(ours)) is None:
        forks = forks_of(documents)
        cases.append(("texts that share a prefix", forest_row(forks), [text for text, _ in forks], 1))
    try:
        Costs.of(ours), attention.most_copied(ours.config)
        mixture, options = Mixture.of(ours), OPTIONS._replace(epilogue=Epilogue.of(ours.config))
        sight = vision.Sight(ours, attention.of_tower("sdpa")) if idle_parts.sees(ours.config) else None
        for what, row, texts, given in cases:
            with block_outputs(ours) as in_ours:
                got = apply_head(ours, hidden_states(ours, sight, mixture, row), row, options)[0][row.scored]
            with block_outputs(theirs) as in_theirs:
                wanted = torch.cat([alone(theirs, text)[given - 1 :] for text in texts])
            if not (difference := float((got - wanted).abs().max())) <= TOLERANCE:
                where = first_difference(ours, in_ours, in_theirs)
                raise Inexact(f"{where}: the log-probabilities of {what} would be {difference:.2g} nat off")
        _check_gradients(ours, sight, mixture, cases[1][1])
    except Inexact:
        raise
    except FOREIGN as error:
        raise Inexact(f"its packed rows cannot be computed ({named(error)})") from error


def _check_gradients(
    model: PreTrainedModel, sight: vision.Sight | None, mixture: Mixture | None, row: Microbatch
) -> None:
    """Ranks could not reduce a weight without a gradient."""
    options = OPTIONS._replace(epilogue=Epilogue.of(model.config))
    with torch.enable_grad():
        apply_head(model, hidden_states(model, sight, mixture, row), row, options)[0].sum().backward()
    idle = idle_parts.idle_names(model)
    for name, parameter in model.named_parameters():
        if name in idle or not parameter.requires_grad:
            continue
        if parameter.grad is None:
            raise Inexact(f"its weight {name} has no gradient")
        if not parameter.grad.isfinite().all():
            raise Inexact(f"its weight {name} has a gradient that is not finite")


def _shared(row: Microbatch) -> Iterator[tuple[str, Microbatch]]:
    yield "answers to a shared prompt", row
    yield "answers to a copied prompt", row.copying(math.inf)


def forks_of(documents: Sequence[np.ndarray]) -> list[tuple[np.ndarray, int]]:
    """Texts, each with its number of tokens shared with the previous one: a fork beyond any window, one within the
    first document, a prefix, and a text by itself.
    """
    first, long, other, last = documents
    whole = np.concatenate([first, long, other])
    fork = len(first) + len(long) - 2
    return [
        (whole, 0),
        (np.concatenate([whole[:fork], last]), fork),
        (whole[: fork - 3], fork - 3),
        (np.concatenate([whole[:3], other]), 3),
        (last, 0),
    ]


def forest_row(texts: Sequence[tuple[np.ndarray, int]]) -> Microbatch:
    """Lay out `texts`, each with its number of tokens shared with the previous one."""

    def text(tokens: np.ndarray, joined: int, row: int) -> Text:
        zeros = np.zeros(len(tokens))
        return Text(tokens, np.arange(len(tokens)) > 0, zeros, zeros, zeros - 1, None, row, joined)

    return lay_out_forest([text(tokens, joined, row) for row, (tokens, joined) in enumerate(texts)])


def packed_row(texts: Sequence[np.ndarray], groups: Sequence[int] = ()) -> Microbatch:
    """Scores all but the first tokens of documents and answers."""
    sampled, zeros = [np.full(len(x), i >= len(groups)) for i, x in enumerate(texts)], [np.zeros(len(x)) for x in texts]
    return lay_out(texts, sampled, zeros, zeros, range(len(texts)), groups)


def alone(model: PreTrainedModel, document: np.ndarray, images: Mapping[str, Tensor] = NO_IMAGES) -> Tensor:
    """Log-probabilities of the model's own forward pass. `images`: from transformers' processor."""
    ids = torch.as_tensor(document)[None]
    logits: Tensor = model(input_ids=ids, use_cache=False, **images).logits[0].float()
    return logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


Parts = dict[str, list[Tensor]]
"""Outputs of blocks' parts: [tokens, width]."""


@contextmanager
def block_outputs(model: PreTrainedModel) -> Iterator[Parts]:
    found: Parts = {}

    def collect(name: str, module: nn.Module, given: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            found.setdefault(name, []).append(first.flatten(0, -2))

    parts = [
        (f"{n}.{name}", part) for n, block in enumerate(loading.blocks(model)) for name, part in block.named_children()
    ]
    hooks = [part.register_forward_hook(partial(collect, name)) for name, part in parts]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(model: PreTrainedModel, ours: Parts, theirs: Parts) -> str:
    """Name the first part of a block whose output differs, else the head."""
    blocks = loading.blocks(model)
    for name, outputs in ours.items():
        mine, own = torch.cat(outputs), torch.cat(theirs.get(name, outputs))
        if mine.shape == own.shape and not float((mine - own).abs().max()) <= TOLERANCE * float(1 + own.abs().max()):
            block, _, part = name.partition(".")
            kind = type(getattr(blocks[int(block)], part)).__name__
            return f"its {kind} (layers.{name}) gives a token another output in a packed row"
    return "its head does more than multiply by the output embedding and by the scale and softcap of its config"


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
