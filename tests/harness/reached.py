"""Tells mutmut which functions a test reaches in the processes that it starts; mutmut sees those of pytest's only.

`tests/mutants.py` copies this file as `sitecustomize.py`, which each Python process of a test imports first, and gives
it to pytest as a plugin. A process that mutmut does not see writes the names of the functions to the file MUTANT_HITS,
each once, and the plugin hands them over at the end of each test.
"""

import os
from pathlib import Path

HITS = Path(os.environ.get("MUTANT_HITS", "hits.txt"))


def write_hits_of_other_processes(seen_by_mutmut: int | None) -> None:
    """Write hits of each process but `seen_by_mutmut`, also of those that it forks."""
    from mutmut.mutation import trampoline

    record, written = trampoline.record_trampoline_hit, set[str]()

    def record_or_write(name: str, caller: str | None = None) -> None:
        if os.getpid() == seen_by_mutmut:
            record(name, caller)
        elif name not in written:
            written.add(name)
            with HITS.open("a") as file:
                file.write(f"{name}\n")

    trampoline.record_trampoline_hit = record_or_write


def pytest_configure() -> None:
    if os.environ.get("MUTANT_UNDER_TEST") == "stats":
        write_hits_of_other_processes(seen_by_mutmut=os.getpid())


def pytest_runtest_teardown() -> None:
    if os.environ.get("MUTANT_UNDER_TEST") == "stats" and HITS.is_file():
        from mutmut.state import state

        state()._stats.update(HITS.read_text().split())
        HITS.write_text("")


pytest_runtest_teardown.pytest_impl = {"tryfirst": True}  # type: ignore[attr-defined]

if __name__ == "sitecustomize" and os.environ.get("MUTANT_UNDER_TEST") == "stats":
    write_hits_of_other_processes(seen_by_mutmut=None)
