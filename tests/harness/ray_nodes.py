"""Ray's own test cluster: nodes of this machine, at loopback addresses of their own, with GPUs that are not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "TMPDIR": "/tmp"}


@contextmanager
def ray_nodes(gpus: int) -> Iterator["Cluster"]:
    """The head, with so many GPUs; all nodes end with it."""
    from ray.cluster_utils import Cluster  # only where a cluster is made: collecting tests must not wait for it

    before = {name: os.environ.get(name) for name in SETTINGS}
    try:
        os.environ.update(SETTINGS)
        made = Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": gpus, "include_dashboard": False})
        try:
            yield made
        finally:
            made.shutdown()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def add(cluster: "Cluster", number: int, gpus: int) -> Any:
    """Another node, at 127.0.0.`number`."""
    return cluster.add_node(**NODE, num_gpus=gpus, node_ip_address=f"127.0.0.{number}")
