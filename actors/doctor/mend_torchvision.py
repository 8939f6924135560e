"""`python -m actors.doctor.mend_torchvision`: the torchvision beside this torch, and a CUDA build of it made to import.

vLLM imports torchvision for every vision-language model. PyPI has only CUDA builds of it: beside a CPU build of torch
their compiled operators do not load, and the import stops because two of them are not declared. Nothing here calls
these two, so it is enough to declare them, at the end of `torchvision/extension.py`. A torchvision that imports is left
as it is, so a second call changes nothing. Run by `make install` on machines without a GPU; waits for pip.
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
    """The torchvision made for a torch: `2.13.0+cpu` -> `0.28.0`; they have counted in step since 2.0 and 0.15."""
    _, minor, patch = torch.partition("+")[0].split(".")[:3]
    return f"0.{int(minor) + 15}.{patch}"


def mend(extension: Path) -> None:
    """Declare the two operators at the end of `torchvision/extension.py`, once.

    Writes a new file: package managers link one file into many environments.
    """
    text = extension.read_text()
    if MEND not in text:
        mended = extension.with_suffix(".mended")
        mended.write_text(text + MEND)
        mended.replace(extension)


def main() -> str | None:
    """Install and mend; returns what is wrong, None if torchvision imports."""
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
