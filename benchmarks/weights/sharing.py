"""Ends of the weights wire on one GPU, where there are fewer GPUs than ends. Waits for nothing."""

import torch


def as_host(end: str) -> dict[str, str]:
    """Environment of a process that shares its GPU with another end, under a name that no other end has.

    NCCL refuses two ranks on one GPU unless they claim to be on two hosts; it then communicates through sockets. So
    what is measured of weights on their way is a bound.
    """
    return {"NCCL_HOSTID": end, "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}


def two_ends() -> dict[str, tuple[int, dict[str, str]]]:
    """GPU and environment of a server and of a learner: a GPU each, if there are two."""
    shared = torch.cuda.device_count() == 1
    gpus = {"server": 0, "learner": min(1, max(torch.cuda.device_count() - 1, 0))}
    return {end: (gpu, as_host(end) if shared else {}) for end, gpu in gpus.items()}
