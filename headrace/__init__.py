"""Headrace for scripts and notebooks: `import headrace; run = headrace.launch("run.yaml", reward=score)`. See
docs/scripts.md."""

from headrace.function_source import NoSource
from headrace.runs import HeadraceError, Run, launch

__all__ = ["HeadraceError", "NoSource", "Run", "launch"]
