"""docs/reference/models-*.md are made of certificates alone, and those in the tree of the certificates in the tree."""

from benchmarks.models.__main__ import FOLDER, in_order, kept
from benchmarks.models.families import families
from benchmarks.models.page import cell, pages
from configs.certificate import Certificate, Check, judged

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
    made = pages({"llama": EXACT, "odd": REFUSED, "faulty": FAULTY}, (1e-4, 1e-3, 1e-3))
    trained, refused = made["models-trained.md"], made["models-refused.md"]
    assert "| llama | `llama` | 5e-06, 2e-05 | no | – | 4e-06 | – | – | – |" in trained
    assert r"| odd | it has a\|b; a &lt;part> |" in refused
    assert "| faulty | two ranks = one: two differ |" in refused
    assert "3 families and variants were tried: **1 are trained exactly**, the other 2 are" in trained
    assert "With torch 2.13, transformers 5.19, 2026-11-27." in trained


def test_a_column_without_comparisons_is_not_one_that_was_left_out() -> None:
    assert (cell([]), cell([Check(what="x", note="why")])) == ("–", "no")


def test_the_pages_in_the_tree_show_every_family() -> None:
    made = in_order(kept())
    assert {name: (FOLDER / name).read_text(encoding="utf-8") for name in made} == made, (
        "python -m benchmarks.models --page"
    )
    text = "".join(made.values())
    assert [name for name in families() if f"| {name} |" not in text] == []
    assert kept().keys() == families().keys()
    assert "Refused by their certificate" not in text, "each is refused before anything starts"
