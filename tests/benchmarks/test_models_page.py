"""docs/reference/models-*.md are made of certificates alone, and those in the tree of the certificates in the tree."""

import json
from pathlib import Path

from benchmarks.models.__main__ import FOLDER, in_order, kept
from benchmarks.models.families import families
from benchmarks.models.on_gpus import section
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


def test_runs_on_gpus_are_rows_with_their_figures(tmp_path: Path) -> None:
    def write(name: str, shape: str, *rows: tuple[str, float]) -> None:
        made = {
            **{"command": f"python -m benchmarks.whole --shape {shape} --ranks 1", "date": "2026-11-28"},
            **{"hardware": "1 x H", "versions": {"vllm": "0.26", "torch": "2.11"}},
            "rows": [{"what": what, "value": value} for what, value in rows],
        }
        (tmp_path / name).write_text(json.dumps(made), encoding="utf-8")

    write("whole-a.json", "gpt-oss-20b-cut", ("probe: median", 0.02184), ("k3 of tokens of the newest policy", 0.0079))
    write("vision-b.json", "Gemma-3-4B-images", ("probe behind a picture, worst", 0.018), ("versions/h", 105.0))
    write("whole-c.json", "Qwen2.5-14B", ("probe: median", 0.0))  # not measured
    lines = section(tmp_path).splitlines()[-2:]
    with_ = "torch 2.11, vllm 0.26, 2026-11-28"
    assert lines == [
        f"| Gemma-3-4B-images | `gemma3` | 1 x H | 0.018 | – | {with_} |",
        f"| gpt-oss-20b-cut | `gpt_oss` | 1 x H | 0.0218 | 0.0079 | {with_} |",
    ]


def test_the_pages_in_the_tree_show_every_family() -> None:
    made = in_order(kept())
    assert {name: (FOLDER / name).read_text(encoding="utf-8") for name in made} == made, (
        "python -m benchmarks.models --page"
    )
    text = "".join(made.values())
    assert [name for name in families() if f"| {name} |" not in text] == []
    assert kept().keys() == families().keys()
    assert "Refused by their certificate" not in text, "each is refused before anything starts"
