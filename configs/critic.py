"""What a run file with a critic (`algorithm.advantage: gae`) must satisfy, and what a critic costs."""

from collections.abc import Iterator

from configs.model_facts import facts_of
from configs.schema import Config, CriticConfig

GAE = "gae"
WHOLE_SAMPLE_LOSSES = ("topr",)
"""These weight a sample by the sign of its one advantage."""
STATE_BYTES = 12
"""Weight and two moments of a parameter in float32."""


def keeps_critic(config: Config) -> bool:
    return config.algorithm.advantage == GAE


def rules(config: Config) -> Iterator[str]:
    """Yield what is wrong with the critic's keys, or with others because there is a critic."""
    algorithm, critic = config.algorithm, config.algorithm.critic
    if not keeps_critic(config):
        for name in critic.model_dump(exclude_defaults=True):
            needs = f"has no effect with algorithm.advantage {algorithm.advantage}"
            yield f"algorithm.critic.{name}: {needs}; set algorithm.advantage: gae or remove the key"
        return
    yield from _steps(config, critic)
    yield from _unproven(config)
    if algorithm.loss in WHOLE_SAMPLE_LOSSES:
        problem = f"algorithm.loss: {algorithm.loss} weights whole samples by the sign of their advantage"
        yield f"{problem}, and with algorithm.advantage gae each token has its own; set algorithm.loss: ppo or dppo"
    if algorithm.opsm_delta is not None:
        problem = f"algorithm.opsm_delta: {algorithm.opsm_delta:g} masks whole samples of negative advantage"
        yield f"{problem}, and with algorithm.advantage gae each token has its own; set opsm_delta: null"


def _steps(config: Config, critic: CriticConfig) -> Iterator[str]:
    if critic.clip is not None and critic.updates == 1:
        problem = f"algorithm.critic.clip: {critic.clip:g} has no effect with algorithm.critic.updates 1"
        yield f"{problem}: no value has moved before the first update; raise updates or set clip: null"
    if critic.warmup_versions >= config.run.versions:
        warmup = f"algorithm.critic.warmup_versions: {critic.warmup_versions}"
        yield f"{warmup} is not below run.versions {config.run.versions}, so the policy is never trained; lower it"


def _unproven(config: Config) -> Iterator[str]:
    facts, key, without = facts_of(config.model), "algorithm.advantage: gae", "take another advantage"
    if config.model.lora is not None:
        yield f"{key} with model.lora: a critic is trained in full, beside full weights alone; {without} or lora: null"
    if facts.image_token is not None or facts.tower:
        yield f"{key}: {config.model.path} reads images, and a critic reads text alone; {without}"
    elif facts.text_alone:
        yield f"{key}: {config.model.path} is multimodal, and a critic is of text models; {without}"
    if facts.experts:
        yield f"{key}: {config.model.path} has {facts.experts} experts, and a critic is of dense models; {without}"
    if config.learner.context_parallel > 1:
        ranks = f"learner.context_parallel: {config.learner.context_parallel}"
        yield f"{key} with {ranks}: a critic computes whole rows; set it to 1 or {without}"
    if config.data.demonstrations is not None:
        yield f"{key} with data.demonstrations: nobody has trained both; remove that key or {without}"
    if config.learner.cpu_offload:
        given = str(config.learner.cpu_offload).lower()
        yield f"{key} with learner.cpu_offload: {given}: a critic stays on its GPU; set it to false or {without}"
