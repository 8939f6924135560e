"""What the scripts of the examples keep: files that the same arguments made before."""

import json
import signal
from pathlib import Path
from typing import Any


def is_kept(record: Path, asked: dict[str, Any], *files: Path) -> bool:
    """Whether all `files` are there and `record`, a JSON file, says that they were made with the arguments `asked`."""
    return all(file.exists() for file in (record, *files)) and json.loads(record.read_text()) == asked


def end_on_ctrl_c() -> None:
    """Have Ctrl-C end this process at once, without a traceback. Files that are kept are written last."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
