"""A tiny transformers model with peft's adapters on its linear layers: what a learner with `model.lora` publishes.

Each version has other adapters, which `at` puts back: peft and transformers compute what vLLM is compared with.
"""

import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from examples.countdown.make_model import make_tokenizer
from learner.weights.plan import LORA_A, LORA_B, Spec
from rollout.tasks.trajectory import Completion
from tests.harness.published import tiny_qwen2
from tests.harness.tiny_experts import tiny_experts

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_base(folder: Path, seed: int = 0, hidden: int = 64, dtype: torch.dtype = torch.float32) -> None:
    """Write a random base model."""
    tiny_qwen2(seed=seed, hidden=hidden).to(dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_experts(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a random mixture of experts, of which adapters have the attention."""
    named = str(dtype).removeprefix("torch.")
    tiny_experts(folder, dtype=named, eos_token_id=None, max_position_embeddings=1024)


class Adapted:
    """Versions of an adapter of the model in `base`. Version 0 does nothing.

    They are computed in float32 of numbers of `dtype`, in which they travel, so that no version is rounded on its way.
    """

    def __init__(
        self,
        base: Path,
        rank: int = 6,
        alpha: float = 12.0,
        targets: Sequence[str] = LINEAR,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        self.dtype = dtype
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model: Any = get_peft_model(
                model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM")
            )
        self._round()
        self.scale, self._versions = alpha / rank, {0: self._adapter()}

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(parameter.to(self.dtype))

    def _adapter(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if "lora_" in name}

    @torch.no_grad()
    def at(self, version: int) -> "Adapted":
        """This, with the adapter of `version`, which is made if need be: far from the one before."""
        if version not in self._versions:
            draw = torch.Generator().manual_seed(version)
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
                elif "lora_A" in name:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
            self._round()
            self._versions[version] = self._adapter()
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(self._versions[version][name])
        return self

    def full_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """What travels: the adapter, `lora_B` multiplied by alpha / rank."""
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                wire = name.removeprefix("base_model.model.").replace(".default.", ".")
                assert wire.endswith((LORA_A, LORA_B))
                scaled = parameter.detach() * (self.scale if wire.endswith(LORA_B) else 1.0)
                yield wire, scaled.to(self.dtype)

    def specs(self) -> list[Spec]:
        return [Spec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.full_weights()]

    def save(self, folder: Path, version: int) -> Path:
        """Write the adapter of `version` as peft does."""
        self.at(version).model.save_pretrained(folder)
        return folder

    def logprobs_of(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of `tokens[1:]`."""
        return self.scores(tokens, [None] * (len(tokens) - 1))

    @torch.no_grad()
    def scores(self, tokens: Sequence[int], versions: Sequence[int | None], temperature: float = 1.0) -> list[float]:
        """Log-probabilities of `tokens[1:]`, each computed by the adapter of its version on the cache that those of the
        tokens before it left. None: the present one."""
        cache, rows, begin = None, [], 0
        for end in range(1, len(versions) + 1):
            if end < len(versions) and versions[end] == versions[begin]:
                continue
            if versions[begin] is not None:
                self.at(versions[begin])
            output = self.model(torch.tensor([tokens[begin:end]]), past_key_values=cache, use_cache=True)
            cache, begin = output.past_key_values, end
            rows.append(output.logits[0])
        logprobs = (torch.cat(rows).float() / temperature).log_softmax(-1)
        return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    def differences(
        self, in_flight: Sequence[tuple[list[int], Completion]], temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Largest distances of pairs of prompt and completion from the scores of each token's version, on the same
        mixed cache: of all tokens; and of the first token of each version from what the version before gives."""
        right, shifted = [], []
        for prompt, completion in in_flight:
            first = completion.versions[0]  # which has read the prompt, too short for the prefix cache
            versions, tokens = [first] * (len(prompt) - 1) + list(completion.versions), prompt + completion.tokens
            switches = np.flatnonzero(np.diff(completion.versions)) + 1
            for into, stamps, places in (
                (right, versions, slice(None)),
                (shifted, [versions[0], *versions[:-1]], switches),
            ):
                theirs = self.scores(tokens, stamps, temperature)[len(prompt) - 1 :]
                into.append(np.abs(np.array(completion.logprobs) - theirs)[places])
        return np.concatenate(right), np.concatenate(shifted)
