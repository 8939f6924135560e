"""`python -m configs RUN.yaml [MORE.yaml ...] [--section.key=value ...]`: explains a run and checks its run file.

Prints the run's arithmetic, notes and facts, then `valid`, or everything that is wrong on stderr with exit code 2. The
checks are those of `actors launch` and `doctor`; they run in a process of their own, because this package imports no
other one.
"""

import logging
import signal
import subprocess
import sys
from collections.abc import Sequence

from configs.checks import refuse_sft
from configs.data.sources import count_rows
from configs.entrypoint import DONE, run_and_exit
from configs.explain import explain
from configs.flow.kv_room import gpu_bytes
from configs.load import dump, read
from configs.plain_text import print_visible
from configs.resume import fingerprint


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 for a run that may start, 2 for one that may not."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `python -m configs RUN.yaml | head` ends quietly
    config = read(argv, "python -m configs", refuse_sft)
    print_visible("\n".join(explain(config, count_rows(config.data.train), gpu_bytes())))
    command = [sys.executable, "-m", "actors.doctor.run_file"]
    code = subprocess.run(command, input=dump(config), encoding="utf-8").returncode
    if code == DONE:
        print_visible(f"valid, fingerprint {fingerprint(config)}")
    return code


if __name__ == "__main__":
    run_and_exit(main, logging.getLogger("configs"))
