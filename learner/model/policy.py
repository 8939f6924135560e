"""The policy: a Hugging Face causal language model under FSDP2.

Methods that compute are collectives of the ranks that share a copy (`learner/mesh.py`); a backward pass is a collective
of all ranks.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from configs.schema import LearnerConfig, ModelConfig
from learner.mesh import shards
from learner.model import attention, compiling, context, float8, loading, state, vision
from learner.model.epilogue import Epilogue
from learner.model.experts.mixture import Mixture
from learner.model.file_form import FileForm
from learner.model.flops import Costs, TowerCosts
from learner.model.gathering import Gathering, blocks_held
from learner.model.head import ChunkLoss, HeadOptions, chunk_tokens, chunked_loss, logprobs_and_entropy
from learner.model.idle_parts import idle_modules, idle_names, sees
from learner.model.lora.adapter import Factor, adapt, factors, initial
from learner.model.master_weights import MasterWeights, keep_wide_gradients, narrow
from learner.model.microbatch import Microbatch, Targets, one_document
from learner.model.prefix_sharing import PrefixSharing
from learner.model.recomputing import recompute
from learner.model.top_tokens import TopTokens
from learner.model.unshard import is_sharded, own_rows, unshard
from learner.model.untrained import set_trained
from learner.model.value_head import replace_head, values
from learner.weights.plan import Spec

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """A published weight or buffer: attribute `key` of `owner`, times `scale`."""

    name: str
    owner: nn.Module
    key: str
    scale: float = 1.0

    @property
    def tensor(self) -> Any:
        return getattr(self.owner, self.key)


class Policy(nn.Module):
    """Computes log-probabilities or, if `valued`, a critic's values.

    Rank 0 reads weights into host memory and shards them tensor by tensor: no other rank ever holds the whole model. An
    undecided `auto` takes the least memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        learner: LearnerConfig,
        mesh: DeviceMesh,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        frozen: bool = False,
        random: bool = False,
        seed: int = 0,
        replay: bool = False,
        valued: bool = False,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        on_gpu = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        parallel, timeout = learner.context_parallel, timedelta(seconds=learner.timeout_s)
        self.context_group = context.join(parallel, timeout) if parallel > 1 else None
        config = loading.read_config(model)
        self.head = HeadOptions(temperature, chunk_tokens(learner), entropy_gradient, Epilogue.of(config))
        self.attention = attention.choose(learner.attention, self.device, self.dtype, config)
        self.model = loading.build_on_meta(model, attention.registered(self.attention))
        self.valued = valued
        if valued:
            replace_head(self.model)
        self.form = FileForm(self.model)
        self._choose_trained(model, learner, frozen)
        self.mixture = Mixture.of(self.model)
        self.replayed = self.mixture.sizes if self.mixture and replay else None
        seeing = sees(self.model.config)
        self.sight = vision.Sight(self.model, attention.of_tower(self.attention)) if seeing else None
        self.costs = replace(Costs.of(self.model), tower=TowerCosts.of(self.model))
        self.sharing = self._sharing(learner)
        if not (frozen or valued):
            self.sharing.tell(learner)
        offload = learner.cpu_offload is True and on_gpu
        if not frozen:
            recompute(self.model, learner.activation_checkpointing, learner.compile is True)
        apart = learner.cpu_offload == "optimizer" and not frozen
        if apart:
            narrow(self.model, self.dtype)
        gather = "pass" if frozen else learner.gather  # only a backward pass would end the others
        held = blocks_held(self.model, gather)
        self._shard(learner.compile is True, offload, held)
        self.gathering = Gathering(self, gather, held, idle_modules(self.model))
        self.masters = MasterWeights(self.model, self.device) if apart else None
        if random:
            place = torch.device("cpu") if offload else self.device
            loading.init_random(self.model, place, shards(mesh), self.masters)
        else:
            given = partial(initial, seed=seed)
            loading.distribute_weights(self.model, model, self.device, offload, given, self.masters)
        if self.masters:
            assert isinstance(self, FSDPModule), "fully_shard made it one"
            keep_wide_gradients(self, self.masters.parameters)

    def _choose_trained(self, model: ModelConfig, learner: LearnerConfig, frozen: bool) -> None:
        """Adapters, FP8 and frozen parts change the layers: this comes before all that looks at them."""
        set_trained(self.model, not frozen)
        if model.lora:
            adapt(self.model, model.lora, self.dtype)
        if learner.matmul == "fp8":
            layers = float8.convert(self.model)
            log.info("learner.matmul: fp8: %d linear layers of the blocks multiply in FP8", layers)
        if not frozen:
            vision.freeze(self.model, model.freeze)

    def _sharing(self, learner: LearnerConfig) -> PrefixSharing:
        other = None
        if self.sight is not None:
            other = "the model sees images"
        elif self.context_group is not None:
            other = "ranks share rows (learner.context_parallel)"
        elif self.replayed is not None:
            other = "routes are replayed (rollout.routing_replay), and a token may have others in each sample"
        kept, blocks = state.kinds(self.model), len(loading.blocks(self.model))
        return PrefixSharing.of(self.model.config, learner, self.attention, self.device, kept, blocks, other)

    def _shard(self, compiled: bool, offload: bool, held: Sequence[nn.Module]) -> None:
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        if compiled:
            compiling.prepare(self.model)
        for block in loading.all_blocks(self.model):
            if compiled:  # FSDP's hooks around it gather and reduce as before
                block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]
            block.register_forward_pre_hook(partial(_cast_inputs, self.dtype), with_kwargs=True)
            if compiled:
                block.register_forward_pre_hook(compiling.forget_views, with_kwargs=True)
            fully_shard(block, reshard_after_forward=not any(block is each for each in held), **options)
            if compiled:
                compiling.keep_integers(block)
        for idle in idle_modules(self.model):
            fully_shard(idle, **options)
        fully_shard(self, **options)

    def forward(
        self,
        microbatch: Microbatch,
        temperature: float | None = None,
        loss: ChunkLoss | None = None,
        top: TopTokens | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probability and entropy of each trainable token given those before it: two [tokens] float32, 0 elsewhere.

        With `loss`, a function of some of `microbatch.scored`, they have no gradient; its sum, [] float32, is the third
        result. `top`: as in `chunked_loss`. A critic has one result: the value of the state after each token, [tokens]
        float32.
        """
        hidden = hidden_states(self.model, self.sight, self.mixture, microbatch)
        if self.valued:
            return (values(self.model, hidden),)
        options = self.head if temperature is None else self.head._replace(temperature=temperature)
        return apply_head(self.model, hidden, microbatch, options, loss, top)

    @torch.no_grad()
    def score(self, microbatch: Microbatch, temperature: float | None = None) -> Tensor:
        """The first result of `forward`, without gradient."""
        logprobs: Tensor = self(microbatch, temperature)[0]
        self.gathering.reshard()
        return logprobs

    def place(self, microbatch: Microbatch) -> Microbatch:
        """Bring `microbatch` from the CPU to this policy's device."""
        return self.prepare(microbatch).to(self.device)

    def prepare(self, microbatch: Microbatch) -> Microbatch:
        """Add on the CPU what `forward` reads: sizes of images, this rank's slice of a shared row, copied keys."""
        if self.sight is not None and microbatch.images is not None:
            microbatch = replace(microbatch, images=self.sight.lay_out(microbatch.images))
        if self.context_group is not None:
            microbatch = context.cut(microbatch, self.context_group)
        return microbatch.copying(self.sharing.most_copied)

    def logprobs_of(self, tokens: Microbatch | Sequence[int]) -> list[float]:
        """Log-probabilities of `tokens[1:]` at temperature 1."""
        row = tokens if isinstance(tokens, Microbatch) else one_document(tokens)
        return self.score(self.place(row), temperature=1.0)[1 : len(row.tokens)].tolist()

    def full_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """Whole weights as the model's files hold and name them, in `model.dtype`, ordered as `weight_specs`.

        With `model.lora` the adapter's matrices, B times the scale. Persistent buffers come last, in their own dtype. A
        collective: all ranks must iterate to the end. Do not write to the tensors, which may share memory.
        """
        for name, weight in unshard(self._published(without), self.device, self.dtype):
            yield from self.form.tensors(name, weight)
        for name, buffer in self._published_buffers(without):
            yield from self.form.tensors(name, buffer)

    def local_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """This rank's own rows, scaled and not rounded. No communication. Do not write to the tensors."""
        with torch.no_grad():
            every = [(name, own_rows(parameter), scale) for name, parameter, scale in self._published(without)]
        for name, local, scale in every:
            yield name, local if scale == 1.0 else local * scale

    def replicated_names(self) -> frozenset[str]:
        return frozenset(name for name, p, _ in self._published() if not is_sharded(p))

    def unsent_by_rows(self) -> str:
        """A weight or buffer that ranks do not send as their own rows, else empty."""
        sent = [name for name, _, _ in self._published()]
        return next((name for name in sent if name in self.form.changed), "") or next(
            (name for name, _ in self._published_buffers()), ""
        )

    def weight_specs(self) -> list[Spec]:
        """Describe what `full_weights` yields; no communication."""
        every = [(name, p.shape, self.dtype) for name, p, _ in self._published()]
        every += [(name, buffer.shape, buffer.dtype) for name, buffer in self._published_buffers()]
        return [Spec(*held, dtype) for name, shape, dtype in every for held in self.form.shapes(name, shape)]

    def _published(self, without: Collection[str] = ()) -> list[Factor]:
        every = [Factor(place.name, place.tensor, place.scale) for place in self._places]
        return [each for each in every if not self._held(each.name, each.parameter, without)]

    def _published_buffers(self, without: Collection[str] = ()) -> list[tuple[str, Tensor]]:
        """With an adapter a server reads them itself."""
        every = [(place.name, place.tensor) for place in self._buffer_places]
        return [(name, buffer) for name, buffer in every if not self._held(name, buffer, without)]

    @cached_property
    def _places(self) -> list[Place]:
        """Found once: the modules stay, while FSDP replaces the parameters in them."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}  # a tied head is listed once
        every = list(factors(self.model)) or [Factor(name, parameter, 1.0) for parameter, name in names.items()]
        return [Place(name, *self._owner(names[parameter]), scale) for name, parameter, scale in every]

    @cached_property
    def _buffer_places(self) -> list[Place]:
        every = [] if self.lora else loading.persistent_buffers(self.model)
        return [Place(name, *self._owner(name)) for name, _ in every]

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        owner, _, key = name.rpartition(".")
        return self.model.get_submodule(owner), key

    def _held(self, name: str, weight: Tensor, names: Collection[str]) -> bool:
        return bool(names) and all(held in names for held, _ in self.form.shapes(name, weight.shape))

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's whole matrices, neither rounded nor scaled; a collective."""
        return unshard((each._replace(scale=1.0) for each in factors(self.model)), self.device, torch.float32)

    def frozen_names(self) -> frozenset[str]:
        """Weights of `model.freeze`, of idle parts, and those that the model's own code freezes."""
        idle = idle_names(self.model)
        every: list[tuple[str, Tensor]] = [(name, p) for name, p, _ in self._published() if not p.requires_grad]
        every += [(name, buffer) for name, buffer in self._published_buffers() if name in idle]
        return frozenset(held for name, x in every for held, _ in self.form.shapes(name, x.shape))

    @property
    def counts(self) -> bool:
        """Only the first of the ranks that share a row counts it."""
        return self.context_group is None or context.size_and_rank(self.context_group)[1] == 0

    @property
    def lora(self) -> bool:
        return any(True for _ in factors(self.model))


def hidden_states(
    model: PreTrainedModel, sight: vision.Sight | None, mixture: Mixture | None, microbatch: Microbatch
) -> Tensor:
    """Final hidden states of this rank's tokens: [tokens, hidden_size]."""
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    tokens, positions = microbatch.tokens[microbatch.held], microbatch.positions[..., microbatch.held]
    given: dict[str, Any] = {"input_ids": tokens[None]} if sight is None else sight.inputs(tokens, microbatch.images)
    positions = positions if sight is None else sight.positions(positions)
    given |= {} if mixture is None else mixture.keywords(microbatch)
    if microbatch.images is not None and microbatch.images.blocks is not None:
        given["image_blocks"] = microbatch.images.blocks
    hidden: Tensor = decoder(
        **given,
        position_ids=positions[None] if positions.dim() == 1 else positions[:, None],
        use_cache=False,
        cu_seq_lens_q=microbatch.cu_seqlens,
        max_length_q=microbatch.max_seqlen,
        shared_prompts=microbatch.shared,
        **({} if microbatch.own is None else {"context_group": microbatch.own.group}),
    ).last_hidden_state[0]
    return hidden


def apply_head(
    model: PreTrainedModel,
    hidden: Tensor,
    microbatch: Microbatch,
    options: HeadOptions,
    loss: ChunkLoss | None = None,
    top: TopTokens | None = None,
) -> tuple[Tensor, ...]:
    """Compute `Policy.forward` from hidden states."""
    own, scored, targets = microbatch.own, microbatch.predicted, microbatch.targets
    predictor = microbatch.predictor if own is None else own.predictor
    tokens, shared = microbatch.tokens if targets is None else targets.tokens, microbatch.shared is not None
    if targets is not None:
        predictor = targets.predictor
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    bias = getattr(head, "bias", None)
    inputs = (
        _Gather.apply(hidden, predictor) if shared else hidden.index_select(0, predictor),  # type: ignore[no-untyped-call]
        head.weight,
        tokens[scored] if targets is None else tokens,
    )
    if loss is None:
        outputs: tuple[Tensor, ...] = logprobs_and_entropy(*inputs, options, bias)
    else:
        outputs = chunked_loss(*inputs, loss if targets is None else _of_targets(loss, targets), options, bias, top)
    zeros = outputs[0].new_zeros(len(microbatch.sampled))
    values = outputs[:2] if targets is None else [output.index_select(0, targets.of_scored) for output in outputs[:2]]
    scores = [zeros.index_copy(0, scored, value) for value in values]
    return *(scores if own is None else [context.whole(score, own.group) for score in scores]), *outputs[2:]


def _of_targets(loss: ChunkLoss, targets: Targets) -> ChunkLoss:
    def of_targets(logprobs: Tensor, entropy: Tensor, chunk: slice) -> Tensor:
        scored = targets.scored(chunk)
        which = targets.of_scored[scored] - chunk.start
        return loss(logprobs.index_select(0, which), entropy.index_select(0, which), scored)

    return of_targets


class _Gather(torch.autograd.Function):
    """`hidden[index]`; gradients of a repeated index, such as a prompt's last token, add up in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.like = hidden.shape, hidden.dtype
        return hidden.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,), (shape, dtype) = ctx.saved_tensors, ctx.like
        total = grads[0].new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
        return total.index_add_(0, index, grads[0].to(total.dtype)).to(dtype), None


def _cast_inputs(dtype: torch.dtype, block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before torch 2.13, FSDP's own hook does nothing where a block is recomputed: a tower's rotary embeddings would be
    float32, its gradients up to 1 % off.
    """
    return tree_map_only(Tensor, lambda given: given.to(dtype) if given.is_floating_point() else given, (args, kwargs))
