"""docs/models.md: made of certificates alone, and the one in the tree is that of the certificates in the tree."""

import re

from benchmarks.models.__main__ import PAGE, kept
from benchmarks.models.families import families
from benchmarks.models.page import cell, page
from configs.certificate import Certificate, Check, judged
from tests.harness.world import ROOT

SOFTWARE = {"versions": {"torch": "2.13", "transformers": "5.19"}, "date": "2026-11-27", "device": "cpu x86_64"}
EXACT = Certificate(
    model="llama",
    kind="llama",
    checks=(
        judged("one document = eager", 3e-6, 1e-4),
        judged("packed documents = alone", 5e-6, 1e-4),
        judged("packed documents = alone, gradient", 2e-5, 1e-3, "of its norm"),
        Check(what="shared prompt = unshared", note="the model has a sliding window of 8"),
        judged("two ranks = one", 4e-6, 1e-4),
    ),
    **SOFTWARE,
)
REFUSED = Certificate(model="x", kind="x", refused="it has a|b; a <part>; take a model of a type", **SOFTWARE)
FAULTY = Certificate(
    model="y", kind="y", checks=(judged("two ranks = one", 1.0, 1e-4, fault="two differ"),), **SOFTWARE
)


def test_a_row_has_the_largest_differences_of_its_column() -> None:
    text = page({"llama": EXACT, "odd": REFUSED, "faulty": FAULTY}, (1e-4, 1e-3, 1e-3))
    assert "| llama | `llama` | 5e-06, 2e-05 | no | 4e-06 | – | – | – |" in text
    assert r"| odd | it has a\|b; a &lt;part> |" in text
    assert "| faulty | two ranks = one: two differ |" in text
    assert "3 families and variants were tried: **1 are trained\nexactly**, the other 2 are refused" in text
    assert "With torch 2.13, transformers 5.19, 2026-11-27." in text


def test_a_column_without_comparisons_is_not_one_that_was_left_out() -> None:
    assert (cell([]), cell([Check(what="x", note="why")])) == ("–", "no")


def test_the_page_in_the_tree_shows_every_family() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in families() if f"| {name} |" not in text] == []
    assert kept().keys() == families().keys()
    assert not re.search(r"Refused by their certificate", text), "each is refused before anything starts"
    assert (ROOT / "docs" / "learner.md").read_text(encoding="utf-8").count("(models.md)") == 2
