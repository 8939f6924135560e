"""The policy: a Hugging Face causal language model under FSDP2, with a chunked log-probability head.

Every rank holds its shard of the fp32 master weights; `fully_shard` gathers one block at a time in `model.dtype` and
reduces gradients in fp32. The same code runs on gloo with CPU and on NCCL with GPUs. Each method that computes is a
collective: all ranks must call it, and wait for the last. Built by `learner/__main__.py`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from configs.schema import LearnerConfig, ModelConfig
from learner.model import attention, loading
from learner.model.flops import Costs
from learner.model.head import ChunkLoss, HeadOptions, chunked_loss, logprobs_and_entropy
from learner.model.microbatch import Microbatch, one_document
from learner.weights.plan import Spec

aten = torch.ops.aten
SAVED_OPS = [
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default),
    *(aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_cudnn_attention.default),
    torch.ops.torch_attn._varlen_attn.default,
]
"""Matmuls and attention: what selective activation checkpointing keeps, because recomputing it is expensive."""


class Policy(nn.Module):
    """`policy(microbatch)` computes log-probabilities. `frozen`: a reference model, without gradients.

    The initial weights are read once, by rank 0, and sharded tensor by tensor: no other rank ever holds the whole
    model, and rank 0 holds it only in its file's dtype in host memory. `random` initialises them instead.
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
    ) -> None:
        super().__init__()
        self.mesh, self.head = mesh, HeadOptions(temperature, learner.head_chunk_tokens, entropy_gradient)
        on_gpu = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        self.attention = attention.choose(learner.attention, self.device, self.dtype)
        self.model = loading.build_on_meta(model, attention.registered(self.attention))
        self.model.requires_grad_(not frozen)
        self.costs = Costs.of(self.model)
        offload = learner.cpu_offload and on_gpu
        if not frozen:
            _checkpoint_activations(self.model, learner)
        self._shard(learner.compile, offload)
        if random:
            loading.init_random(self.model, torch.device("cpu") if offload else self.device)
        else:
            loading.distribute_weights(self.model, model, self.device, offload)

    def _shard(self, compiled: bool, offload: bool) -> None:
        """Wrap each block, then the rest (embedding, last norm, head), which stays gathered until the backward pass."""
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        for block in loading.blocks(self.model):
            if compiled:  # only the arithmetic: FSDP's hooks around it gather and reduce as before
                block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]
            fully_shard(block, **options)
        fully_shard(self, **options)

    def forward(
        self, microbatch: Microbatch, temperature: float | None = None, loss: ChunkLoss | None = None
    ) -> tuple[Tensor, ...]:
        """Log-probability and entropy of each trainable token given those before it: two [tokens] float32.

        Both are 0 where `microbatch.sampled` is false: the head skips these tokens. With `loss`, a function of slices
        of `microbatch.scored`, they have no gradient; its sum, [] float32 with gradient, is the third result.
        """
        scored = microbatch.scored
        inputs = (
            self._hidden(microbatch).index_select(0, scored - 1),
            self.model.get_output_embeddings().weight,  # type: ignore[no-untyped-call]
            microbatch.tokens[scored],
        )
        options = self.head if temperature is None else self.head._replace(temperature=temperature)
        if loss is None:
            outputs: tuple[Tensor, ...] = logprobs_and_entropy(*inputs, options)
        else:
            outputs = chunked_loss(*inputs, loss, options)
        zeros = outputs[0].new_zeros(len(microbatch.tokens))
        return *(zeros.index_copy(0, scored, output) for output in outputs[:2]), *outputs[2:]

    def _hidden(self, microbatch: Microbatch) -> Tensor:
        """Final hidden states: [tokens, hidden_size]."""
        decoder = self.model.get_decoder()  # type: ignore[no-untyped-call]
        hidden: Tensor = decoder(
            input_ids=microbatch.tokens[None],
            position_ids=microbatch.positions[None],
            use_cache=False,
            cu_seq_lens_q=microbatch.cu_seqlens,
            max_length_q=microbatch.max_seqlen,
        ).last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def score(self, microbatch: Microbatch, temperature: float | None = None) -> Tensor:
        """Log-probabilities as in `forward`, without gradient: [tokens] float32."""
        logprobs: Tensor = self(microbatch, temperature)[0]
        assert isinstance(self, FSDPModule), "fully_shard made it one"
        self.reshard()  # only a backward pass does it by itself, and readers of the weights want shards
        return logprobs

    def logprobs_of(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities, at temperature 1, of `tokens[1:]`, each given those before it."""
        return self.score(one_document(tokens).to(self.device), temperature=1.0)[1:].tolist()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole weight with its Hugging Face name, in `model.dtype` on this rank's device; order of
        `weight_specs`.

        Each tensor is a collective: every rank must iterate to the end.
        """
        for name, parameter in self.model.named_parameters():  # a tied head is listed once, as the embedding
            shard = parameter.detach().to(self.device, self.dtype)
            yield name, shard.full_tensor() if isinstance(shard, DTensor) else shard

    def weight_specs(self) -> list[Spec]:
        """Name, shape and dtype of what `full_weights` yields; no communication."""
        return [Spec(name, tuple(p.shape), self.dtype) for name, p in self.model.named_parameters()]

    @property
    def attention_cost(self) -> float:
        """FLOPs of attention per token pair over all other FLOPs per token: the q of n + q n² for n tokens."""
        return self.costs.per_pair / (self.costs.per_token + self.costs.per_trainable)


def _checkpoint_activations(model: PreTrainedModel, learner: LearnerConfig) -> None:
    """Have each block keep less for its backward pass: its input (`block`), or the results of SAVED_OPS too
    (`selective`).

    A compiled block is selective by itself: the compiler keeps matmuls and recomputes what is cheap.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if learner.activation_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED_OPS)
    if learner.activation_checkpointing == "block" or ("context_fn" in options and not learner.compile):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
