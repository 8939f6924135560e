"""`python -m actors.doctor.mend_torchvision`: installs this torch's torchvision, and makes a CUDA build of it import.

PyPI has only CUDA builds: beside a CPU build of torch their operators do not load, and the import stops because two of
them are not declared. Nothing here calls these two, so it is enough to declare them in `torchvision/extension.py`.
"""

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from actors.doctor.host import TORCHVISION, probe
from configs.inner_command import inner_words

MEND_TORCHVISION = "python -m actors.doctor.mend_torchvision"
MISSING = "operator torchvision::nms does not exist"
MEND = """

if not _has_ops():  # added by Headrace (actors/doctor/mend_torchvision.py): a CUDA build beside a CPU build of torch
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def fitting(torch: str) -> str:
    """`2.13.0+cpu` -> `0.28.0`; the versions count in step since 2.0 and 0.15."""
    _, minor, patch = torch.partition("+")[0].split(".")[:3]
    return f"0.{int(minor) + 15}.{patch}"


def mend(extension: Path) -> None:
    """Declare the operators once, in a new file: package managers link one file into many environments."""
    text = extension.read_text()
    if MEND not in text:
        mended = extension.with_suffix(".mended")
        mended.write_text(text + MEND)
        mended.replace(extension)


def main() -> str | None:
    """Returns what is wrong, None if torchvision imports."""
    wanted = f"torchvision=={fitting(version('torch'))}"
    if code := subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", wanted]).returncode:
        return f"{wanted}: pip install failed with exit code {code}; text models do not need it"
    error = probe(TORCHVISION).error
    if MISSING in error:
        importlib.invalidate_caches()
        spec = importlib.util.find_spec("torchvision")
        assert spec and spec.origin
        mend(Path(spec.origin).with_name("extension.py"))
        error = probe(TORCHVISION).error
    return f"{wanted}: importing it fails: {error}" if error else None


if __name__ == "__main__":
    inner_words()
    sys.exit(main())
