"""The keys with which processes of a run, and peers that do not belong to it, reach the two wires."""

from buffer.curve import client_keys_for, ready
from buffer.keys import ClientKeys, Role, ServerKeys, load_client_keys, load_server_keys
from configs.schema import Config


def buffer_keys(config: Config, role: Role) -> ClientKeys:
    """Keys of a client of the buffer."""
    return client_keys_for(config.buffer.address, config.run.path, role)


def learner_keys(config: Config) -> ServerKeys:
    """With which the learner serves its policies."""
    return load_server_keys(ready(config.buffer.address, config.run.path), "learner")


def weights_keys(config: Config) -> ClientKeys:
    """Keys of a client of the learner."""
    return load_client_keys(ready(config.buffer.address, config.run.path), "rollout", server="learner")
