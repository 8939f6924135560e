"""The initial model: its shape without storage, and its weights handed out over the ranks.

Consumes the folder `model.path`. Rank 0 alone reads the weights; `hand_out` and `draw` are collectives or as good as
one: all ranks must call them. Used by `learner.policy` and, for arithmetic without weights, by `learner.memory`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from configs.schema import ModelConfig


def skeleton(model: ModelConfig, implementation: str) -> PreTrainedModel:
    """The model without storage, in fp32, in training mode; its dropout off, for scores must not depend on chance."""
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if getattr(config, name, 0):
            setattr(config, name, 0.0)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=torch.float32,
            attn_implementation=implementation,
            trust_remote_code=model.trust_remote_code,
        )
    assert isinstance(shape, PreTrainedModel)
    shape.train()
    return shape


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks. Raises ValueError for a model whose decoder does not list them as `layers`."""
    layers = getattr(model.get_decoder(), "layers", None)  # type: ignore[no-untyped-call]
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"model.path: {type(model).__name__} has no decoder.layers; take a model that lists its blocks there"
        )
    return list(layers)


def hand_out(shape: PreTrainedModel, model: ModelConfig, device: torch.device, offload: bool) -> None:
    """Fill `shape`, sharded and on meta, from rank 0's copy of the file."""
    source = _read(model) if dist.get_rank() == 0 else {}
    first = {id(parameter): name for name, parameter in shape.named_parameters()}
    filled: dict[str, nn.Parameter] = {}
    for name, parameter in shape.named_parameters(remove_duplicate=False):
        same = first[id(parameter)]  # tied weights are one parameter under two names, and stay one
        if same not in filled:
            assert isinstance(parameter, DTensor)
            full = source[same].to(device, torch.float32) if source else torch.empty(parameter.shape, device=device)
            shard = distribute_tensor(full, parameter.device_mesh, parameter.placements)
            filled[same] = nn.Parameter(shard.cpu() if offload else shard, requires_grad=parameter.requires_grad)
        filled[name] = filled[same]
    shape.load_state_dict(filled, strict=False, assign=True)
    for name, buffer in list(shape.named_buffers()):
        full = source[name].to(device, buffer.dtype) if source else torch.empty_like(buffer, device=device)
        dist.broadcast(full, src=0)
        owner, _, leaf = name.rpartition(".")
        module = shape.get_submodule(owner)
        module.register_buffer(leaf, full, persistent=leaf not in module._non_persistent_buffers_set)


def _read(model: ModelConfig) -> dict[str, Tensor]:
    """The weights and buffers in the folder `model.path`, in the dtype of its files."""
    whole_model = AutoModelForCausalLM.from_pretrained(
        model.path, dtype="auto", trust_remote_code=model.trust_remote_code
    )
    return {name: x.detach() for name, x in [*whole_model.named_parameters(), *whole_model.named_buffers()]}


def draw(shape: PreTrainedModel, device: torch.device) -> None:
    """Random weights in place of the file's, each rank its own shard: for benchmarks of shapes, not for training."""
    shape.to_empty(device=device)
    spread = getattr(shape.config.get_text_config(), "initializer_range", 0.02)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, parameter in shape.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.normal_(0.0, spread, generator=generator) if parameter.dim() > 1 else local.fill_("norm" in name)
    decoder = shape.get_decoder()  # type: ignore[no-untyped-call]
    decoder.rotary_emb = type(decoder.rotary_emb)(config=shape.config.get_text_config()).to(device)
