"""The certificate of a model: what `learner/certify/` compared."""

from collections.abc import Iterator
from math import isfinite
from pathlib import Path

import google_crc32c
from pydantic import BaseModel, ConfigDict, ValidationError

from configs.writing import write_text

FILE = "certificate.json"


class Check(BaseModel):
    """One comparison: `Check(what="packed documents = alone", figure=3e-6, limit=1e-4, unit="nat")`"""

    model_config = ConfigDict(frozen=True, extra="forbid")
    what: str
    figure: float | None = None
    """Largest difference; None: nothing was compared."""
    limit: float | None = None
    unit: str = ""
    fault: str = ""
    """Why the check fails, with the type of the layer at fault."""
    note: str = ""
    """Why nothing was compared, or with what."""

    @property
    def verdict(self) -> str:
        return "FAULT" if self.fault else "not compared" if self.figure is None else "holds"

    def cells(self) -> tuple[str, ...]:
        figure, limit = ("" if x is None else f"{x:.1e}" for x in (self.figure, self.limit))
        unit = f" {self.unit}" if self.unit and figure else ""
        return self.what, f"{figure}{unit}", limit, self.verdict, self.fault or self.note


COLUMNS = ("compared", "largest difference", "limit", "", "why")


def judged(what: str, figure: float, limit: float, unit: str = "nat", fault: str = "", note: str = "") -> Check:
    """Return a check that holds if `figure` is at most `limit`; `fault` says why not."""
    if isfinite(figure):
        why = "" if figure <= limit else fault or "the difference is above the limit"
        return Check(what=what, figure=figure, limit=limit, unit=unit, fault=why, note=note)
    return Check(what=what, limit=limit, unit=unit, fault=f"not finite; {fault}" if fault else "not finite", note=note)


class Certificate(BaseModel):
    """What was compared, and with which software."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str
    kind: str
    copy_of: str = ""
    """The small copy, as `2 layers, hidden size 256, 0.2 M parameters`."""
    key: str = ""
    """Digest of config.json, software and code."""
    versions: dict[str, str] = {}
    date: str = ""
    device: str = "cpu"
    seconds: float = 0.0
    refused: str = ""
    remedy: str = ""
    checks: tuple[Check, ...] = ()
    crc32c: str = ""
    """CRC32C of all other fields; empty from earlier releases."""

    @property
    def faults(self) -> list[str]:
        if self.refused:
            return [self.refused]
        ending = f"; {self.remedy}" if self.remedy else ""
        return [f"{check.what}: {check.fault}{ending}" for check in self.checks if check.fault]

    @property
    def holds(self) -> bool:
        return not self.faults

    def summary(self) -> str:
        done = [check for check in self.checks if check.verdict != "not compared"]
        software = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        when = f"({', '.join(filter(None, (self.date, self.device, software)))})"
        if self.refused:
            return f"certificate: {self.kind} is refused: {self.refused} {when}"
        held = sum(not check.fault for check in done)
        return f"certificate: {held} of {len(done)} comparisons of {self.kind} hold {when}"

    def lines(self) -> Iterator[str]:
        yield self.summary()
        yield from (f"certificate: {line}" for line in (self.faults if not self.refused else ()))


def read(file: Path) -> Certificate | None:
    """The certificate; None if it is missing, damaged or of another release."""
    try:
        found = Certificate.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
    plain = found.model_copy(update={"crc32c": ""})
    return plain if found.crc32c in ("", _crc32c(plain)) else None


def _crc32c(certificate: Certificate) -> str:
    return f"{google_crc32c.value(certificate.model_dump_json().encode()):08x}"


def write(certificate: Certificate, file: Path) -> None:
    """Write the certificate whole or not at all. Raises WriteError."""
    checked = certificate.model_copy(update={"crc32c": _crc32c(certificate)})
    write_text(file, checked.model_dump_json(indent=1) + "\n")
