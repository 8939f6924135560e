"""`python -m benchmarks.reference_pages`: writes docs/reference/keys-*.md and docs/reference/metrics*.md."""

import argparse
from pathlib import Path

from benchmarks.reference_pages.keys import keys_pages
from benchmarks.reference_pages.metrics import metrics_pages

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


def written() -> dict[Path, str]:
    """The pages and their texts."""
    return {FOLDER / name: text for name, text in (keys_pages() | metrics_pages()).items()}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(FOLDER.parents[1]))
