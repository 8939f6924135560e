"""Headrace for scripts and notebooks: `import headrace; run = headrace.launch("run.yaml", reward=score)`.

`run.metrics()`, `run.samples()`, `run.wait()` and `run.stop()` are the rest; `headrace.Run("runs/my")` reads a run that
another program launched. docs/scripts.md is the page for users. The command `headrace` is in `__main__.py`.
"""

from headrace.function_source import NoSource
from headrace.runs import HeadraceError, Run, launch

__all__ = ["HeadraceError", "NoSource", "Run", "launch"]
