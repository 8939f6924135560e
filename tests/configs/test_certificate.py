"""The certificate as data: what holds, what it says of a fault, and how it is kept."""

import random
from pathlib import Path

import pytest

from configs.certificate import Certificate, Check, judged, read, write


def certificate(*checks: Check, refused: str = "") -> Certificate:
    return Certificate(
        model="m", kind="qwen2", date="2026-11-27", versions={"torch": "2.13"}, remedy="take another", checks=checks,
        refused=refused,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("figure", "verdict", "fault"),
    [
        (0.0, "holds", ""),
        (1e-4, "holds", ""),
        (1.1e-4, "FAULT", "its A differs"),
        (float("nan"), "FAULT", "not finite; its A differs"),
        (float("inf"), "FAULT", "not finite; its A differs"),
    ],
)
def test_a_difference_is_judged_by_its_limit(figure: float, verdict: str, fault: str) -> None:
    found = judged("packed = alone", figure, 1e-4, fault="its A differs")
    assert (found.verdict, found.fault) == (verdict, fault)
    assert certificate(found).holds == (verdict == "holds")


def test_what_was_not_compared_neither_holds_nor_fails() -> None:
    found = certificate(Check(what="shared prompt", note="a window"), judged("packed", 0.0, 1.0))
    assert found.holds and found.summary().startswith("certificate: 1 of 1 comparisons of qwen2 hold (2026-11-27, cpu")
    assert found.checks[0].cells() == ("shared prompt", "", "", "not compared", "a window")


def test_a_fault_names_the_comparison_and_the_remedy() -> None:
    found = certificate(judged("packed", 2.0, 1.0, fault="its A differs"))
    assert found.faults == ["packed: its A differs; take another"]
    assert list(found.lines())[1] == "certificate: packed: its A differs; take another"


def test_a_refusal_is_the_only_fault() -> None:
    found = certificate(refused="it has layers of type conv")
    assert found.faults == ["it has layers of type conv"] and not found.holds
    assert len(list(found.lines())) == 1 and "qwen2 is refused: it has layers of type conv" in found.summary()


def test_a_certificate_comes_back_from_its_file(tmp_path: Path) -> None:
    made = certificate(judged("packed", float("nan"), 1.0), judged("alone", 3e-6, 1e-4))
    write(made, tmp_path / "certificate.json")
    assert read(tmp_path / "certificate.json") == made


def test_a_flipped_bit_makes_no_other_certificate(tmp_path: Path) -> None:
    """A run would take a fault for a comparison that holds; without a certificate it makes a new one."""
    made, file = certificate(judged("packed", 2e-4, 1e-4, fault="its A differs"), refused="a layer"), tmp_path / "made"
    write(made, file)
    whole = file.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 600):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        assert read(file) in (None, made), f"bit {bit}"
    file.write_text(made.model_dump_json())
    assert read(file) == made, "as an earlier release wrote it"


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"model": "m"}', '{"model": "m", "kind": "k", "more": 1}'])
def test_a_file_that_holds_no_certificate_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "certificate.json").write_text(text)
    assert read(tmp_path / "certificate.json") is None
