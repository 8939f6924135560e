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
from learner.model.head import ChunkLoss, chunked_loss, logprobs_and_entropy
from learner.train.batch import Microbatch, whole
from learner.weights.plan import Spec


class Policy(nn.Module):
    """`policy(microbatch)` scores its tokens. `frozen`: a reference model, without gradients; `random`: weights drawn.

    The initial weights are read once, by rank 0, and handed out tensor by tensor: no rank but that holds the whole
    model, and it only in its file's dtype in host memory.
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
        self.mesh, self.temperature, self.entropy_gradient = mesh, temperature, entropy_gradient
        on_gpu = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        self.chunk = learner.head_chunk_tokens
        self.attention = attention.choose(learner.attention, self.device, self.dtype)
        self.model = loading.skeleton(model, attention.registered(self.attention))
        self.model.requires_grad_(not frozen)
        self.offload = learner.cpu_offload and on_gpu
        self.costs = Costs.of(self.model)
        self._shard(learner, frozen)
        if random:
            loading.draw(self.model, torch.device("cpu") if self.offload else self.device)
        else:
            loading.hand_out(self.model, model, self.device, self.offload)

    def _shard(self, learner: LearnerConfig, frozen: bool) -> None:
        """Wrap each block, then the rest (embedding, last norm, head), which stays gathered until the backward pass."""
        if not frozen:
            _checkpoint(self.model, learner)
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy() if self.offload else OffloadPolicy()
        for block in loading.blocks(self.model):
            if learner.compile:  # the arithmetic alone: FSDP's hooks around it gather and reduce as ever
                block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]
            fully_shard(block, mesh=self.mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(self, mesh=self.mesh, mp_policy=precision, offload_policy=offload)

    def forward(
        self, microbatch: Microbatch, temperature: float | None = None, loss: ChunkLoss | None = None
    ) -> tuple[Tensor, ...]:
        """Log-probability and entropy of each trainable token given those before it: two [tokens] float32.

        0 where `microbatch.sampled` is false: there the head computes nothing. With `loss`, a function of some of
        `microbatch.scored`, they have no gradient, and its sum is the third answer, [] float32, which has.
        """
        scored = microbatch.scored
        given = (
            self._hidden(microbatch).index_select(0, scored - 1),
            self.model.get_output_embeddings().weight,  # type: ignore[no-untyped-call]
            microbatch.tokens[scored],
        )
        options = self.temperature if temperature is None else temperature, self.chunk, self.entropy_gradient
        if loss is None:
            scores: tuple[Tensor, ...] = logprobs_and_entropy(*given, *options)
        else:
            scores = chunked_loss(*given, loss, *options)
        blank = scores[0].new_zeros(len(microbatch.tokens))
        return *(blank.index_copy(0, scored, score) for score in scores[:2]), *scores[2:]

    def _hidden(self, microbatch: Microbatch) -> Tensor:
        """What the last norm answers: [tokens, width]."""
        decoder = self.model.get_decoder()  # type: ignore[no-untyped-call]
        hidden: Tensor = decoder(
            input_ids=microbatch.tokens[None],
            position_ids=microbatch.positions[None],
            use_cache=False,
            cu_seq_lens_q=microbatch.starts,
            cu_seq_lens_k=microbatch.starts,
            max_length_q=microbatch.longest,
            max_length_k=microbatch.longest,
        ).last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def score(self, microbatch: Microbatch, temperature: float | None = None) -> Tensor:
        """Log-probabilities as `forward` has them, without gradient: [tokens] float32."""
        logprobs: Tensor = self(microbatch, temperature)[0]
        self._shards().reshard()  # only a backward pass does it by itself, and the next reader wants the shards
        return logprobs

    def _shards(self) -> FSDPModule:
        assert isinstance(self, FSDPModule)  # `fully_shard` made it one
        return self

    def logprobs_of(self, tokens: Sequence[int]) -> list[float]:
        """Raw log-probabilities (temperature 1) of `tokens[1:]`, each given those before it."""
        return self.score(whole(tokens).to(self.device), temperature=1.0)[1:].tolist()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight, whole, under its Hugging Face name, in `model.dtype` on this rank's device; order of the specs.

        A collective for each tensor: every rank must run through it, to the end.
        """
        for name, parameter in self.model.named_parameters():  # a tied head is listed once, as the embedding
            shard = parameter.detach().to(self.device, self.dtype)
            yield name, shard.full_tensor() if isinstance(shard, DTensor) else shard

    def weight_specs(self) -> list[Spec]:
        """Name, shape and dtype of what `full_weights` yields; no communication."""
        return [Spec(name, tuple(p.shape), self.dtype) for name, p in self.model.named_parameters()]

    @property
    def attention_cost(self) -> float:
        """Cost of attending to one token, in units of a token's cost in all else: the q of n + q n² for n tokens."""
        return self.costs.by_pair / (self.costs.by_token + self.costs.by_scored)


def _checkpoint(model: PreTrainedModel, learner: LearnerConfig) -> None:
    """Have each block keep less for its backward pass: `block` its input, `selective` what came of products too.

    Compiled, a block is selective by itself: the compiler keeps products and computes what is cheap again.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if learner.activation_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, attention.products())
    if learner.activation_checkpointing == "block" or ("context_fn" in options and not learner.compile):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
