"""A launched run whose rewards come from its own reward server, a real vLLM, which is killed while the run works."""

import subprocess
import sys

import psutil
import pytest

from buffer.wire.sample import Sample
from tests.harness.ports import free_port
from tests.harness.tiny_reward import make_reward_model
from tests.harness.toy import ROOT, Run, Toy, python
from tests.system.test_run import until

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]


def reward_servers(run: Run) -> list[psutil.Process]:
    return [process for process in run.processes("rollout") if "reward" in process.cmdline()]


def test_killed_reward_servers_cost_time_and_no_sample(toy: Toy) -> None:
    """SIGKILL to the reward server: scoring waits for its restart, and no sample gets another reward than its own."""
    run, versions, port = toy.run("reward-server"), 24, free_port()
    model = make_reward_model(toy.folder / "reward-model")
    functions = "[{function: countdown}, {function: reward_model, weight: 0.01, name: liked}]"
    settings = toy.settings(
        "reward-server",
        f"--run.versions={versions}",
        f"--reward.function={functions}",
        f"--reward.model={model}",
        "--reward.servers=1",
        f"--reward.port={port}",
        "--reward.engine={dtype: float32, max_model_len: 256, kv_cache_memory_bytes: 67108864}",
        "--rollout.attempts=1",
    )
    command = [sys.executable, "-m", "actors", "launch", *settings]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            until(lambda: len(run.metrics()) >= 3, "third version")
            (server,) = reward_servers(run)
            children = server.children(recursive=True)
            server.kill()
            assert children and not psutil.wait_procs(children, timeout=120)[1]
            version = len(run.metrics())
            shown = python("actors", "status", run.path).stdout
            assert f"reward server reward-0 at http://127.0.0.1:{port}: does not answer" in shown
            until(lambda: len(run.metrics()) > version + 6, "version by the new reward server")
            assert "reward-0 at" in python("actors", "status", run.path).stdout
            output, _ = launcher.communicate(timeout=480)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, output[-4000:]
    assert [record["version"] for record in run.metrics()] == list(range(1, versions + 1))
    assert "--- reward-0 failed: exit code 137" in run.log("reward-0")
    assert run.log("reward-0").count("--- reward-0 started") == 2
    assert "scoring waits for a reward server at" in run.log("rollout-0")
    assert (run.path / "logs" / "reward-0.progress").exists()
    assert run.query("select item from items where state = 'dropped'") == []
    rows = run.query("select data_of(segment, position, samples.bytes) from items join samples using (item)")
    samples = [Sample.unpack(data) for (data,) in rows]
    assert len(samples) >= versions * 16
    for sample in samples:
        assert sample.metrics["liked"] != 0.0
        assert sample.reward == pytest.approx(sample.metrics["countdown"] + 0.01 * sample.metrics["liked"])
    assert len({sample.metrics["liked"] for sample in samples}) > 20
    assert run.left_behind() == []
