"""`python -m configs.run_path RUN.yaml [MORE.yaml ...] [--section.key=value ...]`: prints where a run's folder is.

The answer is JSON, `{"folder": "runs", "path": "runs/my"}`, for `headrace`, which imports nothing of this package.
"""

import json
import logging
from collections.abc import Sequence

from configs.entrypoint import DONE, run_and_exit
from configs.load import read
from configs.plain_text import print_visible


def main(argv: Sequence[str]) -> int:
    run = read(argv, "headrace.launch").run
    print_visible(json.dumps({"folder": str(run.folder), "path": str(run.path)}))
    return DONE


if __name__ == "__main__":
    run_and_exit(main, logging.getLogger("configs"))
