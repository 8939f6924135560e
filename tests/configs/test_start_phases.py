"""How long the parts of a start took: from the process's beginning, in order, without a gap."""

import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from configs import start_phases
from configs.start_phases import StartPhases


def test_the_first_phase_begins_with_the_process() -> None:
    code = "import time; time.sleep(0.3); from configs.start_phases import *; print(StartPhases())"
    began = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    whole, imports = map(float, re.findall(r"([\d.]+) s", said))
    assert 0.3 <= whole == imports <= time.monotonic() - began + 0.1 and said.endswith("s imports\n")


def test_phases_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1000.0, 1000.0, 1000.2, 1000.2])
    monkeypatch.setattr(start_phases, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(start_phases, "seconds_alive", lambda: 3.1)
    phases = StartPhases("imports")
    phases.end("buffer")
    phases.end("vLLM")
    assert str(phases) == "3.3 s: 3.1 s imports, 0.2 s buffer, 0.0 s vLLM"


def test_the_parts_of_real_phases_add_up() -> None:
    phases = StartPhases("imports")
    phases.end("buffer")
    whole, *parts = map(float, re.findall(r"([\d.]+) s", str(phases)))
    assert whole == pytest.approx(sum(parts), abs=0.11)
