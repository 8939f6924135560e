"""Decides what a policy computes once for several samples: prompts, longer prefixes, or neither."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from configs.schema import LearnerConfig
from learner.model import attention
from learner.model.host_copies import INPUTS_HELD

log = logging.getLogger(__name__)


@dataclass
class PrefixSharing:
    prompts: bool
    key_room: float | None
    most_copied: float
    unshared: str | None
    """Why prompts cannot be shared."""
    no_trees: str | None
    """Why no longer prefixes can be shared."""

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        learner: LearnerConfig,
        name: str,
        device: torch.device,
        kept: Sequence[str],
        blocks: int,
        other: str | None = None,
    ) -> "PrefixSharing":
        unshared = attention.why_unshared(config, name, device, kept)
        no_trees = other or attention.why_no_trees(config, name, device, kept)
        inputs = min(blocks, INPUTS_HELD) if learner.activation_checkpointing == "offload" else blocks
        room = None if learner.share_prompts is not True or no_trees else attention.key_room(config, inputs)
        prompts = bool(learner.share_prompts) and unshared is None
        return cls(prompts, room, attention.most_copied(config), unshared, no_trees)

    @property
    def whole_groups(self) -> bool:
        return self.prompts or self.key_room is not None

    def tell(self, learner: LearnerConfig) -> None:
        if learner.share_prompts and self.key_room is None and self.unshared:
            log.warning("learner.share_prompts: off, every sample's prompt is computed: %s", self.unshared)
        elif learner.share_prompts is True and self.no_trees:
            log.info("learner.share_prompts: prompts alone are computed once, no longer prefixes: %s", self.no_trees)
