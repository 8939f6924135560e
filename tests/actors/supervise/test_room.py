"""GPUs of servers that come and go: Ray itself, made to believe in two GPUs, and fake commands, in another process."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, sys
from pathlib import Path
import ray
from dataclasses import replace
from actors.process import Process
from actors.supervise.ray_cluster import Cluster
from actors.supervise.supervisor import Supervisor

CODE = '''
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
'''

def process(name, role, gpus=0):
    return Process(name, role, (sys.executable, "-c", CODE), Path(sys.argv[1]) / f"{name}.log", gpus=gpus)

def server(number):
    return process(f"rollout-{number}", "rollout", 1)

async def main():
    cluster = Cluster(None, "")  # what a run file says matters to learners of several nodes only
    room = cluster.room
    first = [process("buffer", "buffer"), process("learner", "learner"), server(0)]
    supervisor = Supervisor(first, cluster.place, lambda process, event: None, print)
    running = asyncio.create_task(supervisor.run())

    async def until(holds):
        while not holds():
            assert not running.done()
            await asyncio.sleep(0.1)

    def started(*names):
        return [name for name, life in supervisor.servers().items() if life == "started"] == list(names)

    await until(lambda: started("rollout-0") and room(1) == 1)
    assert (room(2), room(0)) == (0, None)
    supervisor.add(server(1))
    await until(lambda: started("rollout-0", "rollout-1") and room(1) == 0)
    supervisor.add(server(2))
    supervisor.add(server(3))
    await supervisor.drain_server("rollout-2", 60.0)  # it waits for a GPU, and is not wanted any more
    assert supervisor.servers()["rollout-3"] == "placing"
    await supervisor.drain_server("rollout-0", 60.0)
    await until(lambda: started("rollout-1", "rollout-3"))
    assert supervisor.left == ["rollout-2", "rollout-0"]
    gang = asyncio.create_task(cluster.place(replace(first[1], nodes=2)))  # there is one node
    groups = lambda: [group["state"] for group in ray.util.placement_group_table().values()]
    await until(groups)
    gang.cancel()
    await until(lambda: groups() == ["REMOVED"])
    print("as it should be", flush=True)
    running.cancel()

ray.init(address="local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False,
         object_store_memory=80 << 20, _temp_dir=sys.argv[2])
asyncio.run(asyncio.wait_for(main(), 200))
"""


@pytest.mark.timeout(300)
def test_a_drained_servers_gpu_is_the_next_ones_and_one_that_waits_can_be_taken_back(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_memory_monitor_refresh_ms": "0"}
    with tempfile.TemporaryDirectory(prefix="headrace-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        words = [sys.executable, str(script), str(tmp_path), temporary]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=280)
    assert "as it should be" in done.stdout, done.stdout + done.stderr
