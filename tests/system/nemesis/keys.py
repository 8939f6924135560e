"""The keys with which processes of a run, and peers that do not belong to it, reach the two wires."""

from buffer.curve import ClientKeys, ServerKeys, client_keys_for, server_keys_for
from configs.schema import Config


def buffer_keys(config: Config) -> ClientKeys | None:
    """Of a client of the buffer."""
    return client_keys_for(config.buffer.address, config.run.path)


def learner_keys(config: Config) -> ServerKeys | None:
    """With which the learner serves its policies."""
    return server_keys_for(f"tcp://{config.weights.host}:0", config.run.path)


def weights_keys(config: Config) -> ClientKeys | None:
    """Of a client of the learner."""
    return client_keys_for(f"tcp://{config.weights.host}:0", config.run.path)
