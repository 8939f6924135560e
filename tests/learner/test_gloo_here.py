"""Gloo, which has no authentication, listens on loopback wherever all its processes are on one machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs.variables import gloo_here

STARTS = {
    "learner": """
import torch
from configs.schema import Config
from learner import mesh
with mesh.process_group(Config.model_construct(learner=mesh.LearnerConfig()), torch.device("cpu"), list):
    show()
""",
    "certificate": """
from learner.certify import process
with process.one_rank():
    show()
""",
    "rollout server": """
import torch.distributed as dist
from rollout.engine import arguments
os.environ |= arguments.environment(cpu=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
show()
""",
}
SHOW = """
import os, socket, psutil
def show():
    listening = {each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}
    print(os.environ.get("GLOO_SOCKET_IFNAME"), *listening)
"""


@pytest.mark.parametrize("who", STARTS)
def test_gloo_listens_on_loopback_whatever_the_machines_name_means(who: str) -> None:
    """Where the name of the machine led to its network, gloo listened there."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", SHOW + STARTS[who]], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["lo", "127.0.0.1"]


def test_an_interface_that_a_person_or_a_cluster_chose_is_kept() -> None:
    gloo_here(environment := {"GLOO_SOCKET_IFNAME": "ib0"})
    assert environment == {"GLOO_SOCKET_IFNAME": "ib0"}
