"""A Ray of this machine is for its user only: it listens on loopback, beneath a folder that nobody else may enter."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from configs.variables import RAY_BYTES, SOCKET_BYTES

SCRIPT = """
import json, os, sys
import psutil
from actors.supervise import ray_cluster
from configs.load import load

words = ["--model.path=m", "--data.train=d", "--reward.function=countdown"]
config = load([*words, "--rollout.device=cpu", "--learner.device=cpu"])
with ray_cluster.ray_cluster(config):
    import ray

    assert ray.get(ray.remote(lambda: os.getpid()).remote()) != os.getpid()
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [socket for process in processes for socket in process.net_connections("all")]
    listening = sorted({socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN})
    (folder,) = [name for name in os.listdir(sys.argv[1]) if name.startswith("headrace-")]
    mode = os.stat(os.path.join(sys.argv[1], folder)).st_mode & 0o777
    longest = max(len(str(socket.laddr)) for socket in sockets if socket.family.name == "AF_UNIX")
    print(json.dumps([listening, mode, longest]))
"""


@pytest.mark.long  # Ray starts
def test_ray_listens_on_loopback_beneath_a_private_folder() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r-") as temporary:
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": temporary}
        done = subprocess.run([sys.executable, "-c", SCRIPT, temporary], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listening, mode, longest = json.loads(done.stdout.splitlines()[-1])
    assert listening and {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    assert mode == 0o700 and longest <= SOCKET_BYTES


def test_ray_s_longest_socket_fits_the_longest_folder() -> None:
    ours, session = "/headrace-12345678/r", "/session_2026-01-01_00-00-00_123456_1234567"
    assert len("x" * RAY_BYTES + ours + session + "/sockets/plasma_store") <= SOCKET_BYTES
