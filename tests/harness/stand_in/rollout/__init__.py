"""The package `rollout` with another `__main__`: with this folder first on PYTHONPATH, `python -m rollout` is a server
without vLLM. All other modules are the real ones."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[4] / "rollout"))
