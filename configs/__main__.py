"""`python -m configs RUN.yaml [MORE.yaml ...] [--section.key=value ...]`: explains a run and checks its run file.

Prints the run's arithmetic and notes, then `valid`, or every contradiction on stderr with exit code 2. Starts nothing.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from configs.checks import check
from configs.entrypoint import BAD_INPUT, DONE
from configs.explain import explain
from configs.load import ConfigError, read
from configs.resume import fingerprint


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 for a run that may start, 2 for one that may not."""
    config = read(argv, "python -m configs")
    problems = _count(config.data.train)
    print("\n".join(explain(config, problems)))
    try:
        check(config, problems=problems)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print(f"valid, fingerprint {fingerprint(config)}")
    return DONE


def _count(path: Path) -> int | None:
    """Rows of a data file; None if it cannot be read, which `check` or the buffer reports."""
    if not path.is_file():
        return None
    if path.suffix != ".parquet":
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    from pyarrow import ArrowException, parquet  # slow to import, and needed here only

    try:
        return int(parquet.ParquetFile(path).metadata.num_rows)
    except (OSError, ArrowException):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
