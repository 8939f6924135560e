"""What `learner.cpu_offload` must satisfy."""

from collections.abc import Iterator

from configs.schema import Config


def contradictions(config: Config) -> Iterator[str]:
    if config.learner.cpu_offload == "optimizer" and config.model.lora is not None:
        why = "the weights of an adapter are few, and so are their moments"
        yield f"learner.cpu_offload: optimizer with model.lora: {why}; set it to false"
