"""`python -m buffer scrub RUN`: reads every byte that a run keeps, and prints what is damaged. Changes nothing."""

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from google_crc32c import value as crc32c

from buffer.inspect import found
from buffer.keys import KeysError, require_keys
from buffer.ledger.types import LedgerError
from buffer.store import segments, start_checks, witness
from buffer.store.faults import StoreError
from buffer.store.opening import explained, require_whole, unsound
from buffer.store.segments import Place
from buffer.store.sqlite import reading
from configs.checkpoint_files import DAMAGED, damage, fault, listed
from configs.entrypoint import BAD_INPUT, DONE, FAILED, CommandParser
from configs.plain_text import print_visible

PROG = "python -m buffer scrub"
WHAT = "read all of a run, and print what is damaged"
MOST = 100
SAMPLES = "SELECT item, idx, segment, position, bytes, crc32c FROM samples ORDER BY segment, position"
STILL = "SELECT 1 FROM samples WHERE item = ? AND idx = ? AND segment = ? AND position = ?"


class Scrub:
    """Yields lines about what it read; `damaged` counts those about damage."""

    def __init__(self) -> None:
        self.damaged = 0

    def all(self, run: Path, ledger: Path | None) -> Iterator[str]:
        if ledger:
            yield from self.ledger(ledger)
        for path in sorted((run / "checkpoints").glob("v*")):
            if path.is_dir() and path.name[1:].isdigit():
                yield self.checkpoint(path)
            elif path.suffix == DAMAGED:
                yield f"{path}: set aside as damaged; the learner does not restore it"
        if (keys := run / "keys").is_dir():
            yield self.keys(keys)

    def ledger(self, file: Path) -> Iterator[str]:
        known = None
        try:
            known = witness.noted(file)
        except ValueError as error:
            yield self._damage(str(error))
        try:
            start_checks.require_same_bytes(file, known)
            require_whole(file, known)
            with closing(reading(file)) as db, explained(file):
                lines = [f"{file}: {line}" for line in unsound(db, MOST)]
                yield from map(self._damage, lines)
                if not lines:
                    yield f"{file}: pages and rows are sound"
                yield from self.samples(db, file)
        except StoreError as error:
            yield self._damage(str(error))

    def samples(self, db: sqlite3.Connection, file: Path) -> Iterator[str]:
        folder, number, unknown = segments.folder_of(file), 0, 0
        for item, index, segment, position, size, crc in db.execute(SAMPLES):
            number, unknown = number + 1, unknown + (crc is None)
            try:
                now = crc32c(segments.read(folder, Place(segment, position), size))
                problem = None if crc in (None, now) else f"its CRC32C is {now:08x}, and was {crc:08x}"
            except OSError as error:
                problem = str(error.strerror)
            if problem and self._still_there(file, item, index, segment, position):
                yield self._damage(f"{segments.path_of(folder, segment)}: sample {index} of item {item}: {problem}")
        yield f"{folder}: {number} samples read{f', {unknown} of them without a checksum' if unknown else ''}"

    def _still_there(self, file: Path, *where: int) -> bool:
        """A live buffer may have removed the sample meanwhile."""
        with closing(reading(file)) as db:
            return db.execute(STILL, where).fetchone() is not None

    def checkpoint(self, folder: Path) -> str:
        if problem := fault(folder) or damage(folder):
            return self._damage(f"{folder}: {problem}")
        files = listed(folder)
        without = "" if files.sums else ", without checksums"
        return f"{folder}: {len(files.sizes)} files read{without}"

    def keys(self, folder: Path) -> str:
        try:
            require_keys(folder)
        except KeysError as error:
            return self._damage(str(error))
        return f"{folder}: all keys are sound"

    def _damage(self, line: str) -> str:
        self.damaged += 1
        return f"damaged: {line}"


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(PROG, description=WHAT)
    parser.add_argument("run", nargs="+", help="its folder, or its config files; --section.key=value as elsewhere")
    given, overrides = parser.parse_known_args(argv)
    scrub, first = Scrub(), Path(given.run[0])
    try:
        config, ledger = found([*given.run, *overrides])
        for line in scrub.all(first if first.is_dir() else config.run.path, ledger):
            print_visible(line)
    except (LedgerError, OSError) as error:
        print_visible(f"{PROG}: {error}", sys.stderr)
        return BAD_INPUT
    if scrub.damaged:
        print_visible(f"{PROG}: {scrub.damaged} damaged", sys.stderr)
    return FAILED if scrub.damaged else DONE
