"""`python -m learner digest CHECKPOINT MODEL`: prints MODEL's digest, to compare with the base of CHECKPOINT's adapter.

`python -m rollout evaluate` runs it as a process, because rollout does not import this package. Exit 2: bad input.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from configs.entrypoint import BAD_INPUT, DONE
from configs.plain_text import print_visible
from learner.model.loading import read_base
from learner.model.lora.base import digest
from learner.saved.manifest import adapter_of

PROG = "python -m learner digest"


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        if len(argv) != 2:
            raise ValueError("takes CHECKPOINT and MODEL, two folders")
        checkpoint, path = argv
        if (adapter := adapter_of(Path(checkpoint))) is None:
            raise ValueError(f"{checkpoint}: has no adapter")
        model = adapter.model.model_copy(update={"path": path})
        print_visible(digest(read_base(model)))
    except (ValueError, OSError) as error:
        print_visible(f"{PROG}: {str(error).splitlines()[0]}", sys.stderr)
        return BAD_INPUT
    return DONE
