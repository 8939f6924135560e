"""Stub of `verifiers.types`."""

from dataclasses import dataclass


@dataclass
class ClientConfig:
    """Where the model is."""

    client_type: str
    api_base_url: str
    api_key_var: str
