"""Runs the code cells of a notebook in this process, as a kernel does: `python -m tests.harness.notebook FILE`.

It imports nothing of Headrace, whose packages may be hidden by a user's where it runs. The names live in `__main__`,
the current folder is the first in `sys.path`, and `inspect` finds the text of each cell.
"""

import argparse
import json
import linecache
import sys
from pathlib import Path
from types import ModuleType


def main(file: str) -> None:
    """Run one cell after the other; what a cell raises ends the process."""
    sys.path.insert(0, "")
    kernel = sys.modules["__main__"] = ModuleType("__main__")
    for number, cell in enumerate(json.loads(Path(file).read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            name, text = f"<ipython-input-{number}>", "".join(cell["source"])
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
            exec(compile(text, name, "exec"), vars(kernel))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    main(parser.parse_args().file)
