"""`make mutants`: what it tries, and that it knows which functions a test reaches in processes of its own."""

import os
import subprocess
import sys

import pytest

from tests.mutants import AREAS, REACHED, ROOT, sample


def test_one_in_ten_are_those_that_end_with_7_and_one_in_forty_a_part_of_them():
    assert {name[-1] for name in sample(10)} == {"7"}
    assert sample(40)[:2] == ["*__mutmut_17", "*__mutmut_57"]
    assert {*sample(40)} < {*sample(10)} < {*sample(1)}


@pytest.mark.parametrize("name", AREAS)
def test_an_area_names_files_and_tests_that_exist(name):
    for pattern in AREAS[name].files:
        assert [*ROOT.glob(pattern)], pattern
    for path in AREAS[name].tests:
        assert (ROOT / path).exists(), path


def test_a_process_that_a_test_starts_writes_what_it_reaches_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_bytes(REACHED.read_bytes())
    hits = tmp_path / "hits.txt"
    script = "from mutmut.mutation import trampoline as t; [t.record_trampoline_hit('buffer.x_cut') for _ in 'ab']"
    variables = {"PYTHONPATH": str(tmp_path), "MUTANT_HITS": str(hits), "MUTANT_UNDER_TEST": "stats"}
    subprocess.run([sys.executable, "-c", script], env=os.environ | variables, cwd=tmp_path, check=True)
    assert hits.read_text() == "buffer.x_cut\n"
