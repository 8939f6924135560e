"""How long the parts of a start took: from the process's beginning, in order, without a gap."""

import re
import subprocess
import sys
import time

import pytest

from configs.start_phases import StartPhases


def test_the_first_phase_begins_with_the_process() -> None:
    code = "import time; time.sleep(0.3); from configs.start_phases import *; print(StartPhases())"
    began = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    whole, imports = map(float, re.findall(r"([\d.]+) s", said))
    assert 0.3 <= whole == imports <= time.monotonic() - began + 0.1 and said.endswith("s imports\n")


def test_phases_add_up_to_the_whole() -> None:
    phases = StartPhases("imports")
    time.sleep(0.2)
    phases.end("buffer")
    phases.end("vLLM")
    whole, *parts = map(float, re.findall(r"([\d.]+) s", str(phases)))
    assert re.fullmatch(r"[\d.]+ s: [\d.]+ s imports, 0\.2 s buffer, 0\.0 s vLLM", str(phases))
    assert whole == pytest.approx(sum(parts), abs=0.11)
