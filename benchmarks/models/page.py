"""docs/reference/models-*.md, made of the certificates in `benchmarks/results/models.json`. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from configs.certificate import Certificate, Check

GROUPS: Mapping[str, tuple[str, ...]] = {
    "packed": ("one document", "packed"),
    "shared prompts": ("shared prompt", "copied prompt"),
    "images": ("images",),
    "two ranks": ("two ranks",),
    "pushed": ("changed weights", "weights pushed"),
    "exported": ("export",),
    "vLLM": ("server",),
}
"""Columns, and how the names of their comparisons begin."""
NOTE = "<!-- Written by `python -m benchmarks.models` from certificates; do not edit it. -->"
TRAINED = """# Families that are trained exactly

{note}

{count} were tried: **{exact} are trained exactly**, the other {refused} are [refused](models-refused.md)
by name before anything starts. [Which models](../models.md) says what is compared and how to try yours.

A figure is the largest difference found: of log-probabilities in nats (above 1 nat as a share), or of a gradient as a
share of its norm. Up to {limit:g} nat holds, with vLLM {server_limit:g}, and {gradient_limit:g} of a gradient. "no"
means that the learner, or vLLM on a CPU, does not do this for the model, which in the learner costs speed only; "–"
means not compared. All figures are of {device}: no certificate is made on a GPU, whose kernels `tests/gpu` compares
with the same arithmetic. Images of Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Gemma 3 are trained ([vision](../vision.md));
other models of images and text are trained [on text alone](../text-alone.md). Servers try mixtures of
experts that nobody has compared ([experts](../experts.md)).
With {versions}, {date}.
"""
REFUSED = """# Families that are refused

{note}

{refused} of {count} are refused by name before anything starts, for these reasons. The others are
[trained exactly](models-trained.md). [Which models](../models.md) says how to try yours.
"""


def pages(found: Mapping[str, Certificate], limits: tuple[float, float, float]) -> dict[str, str]:
    """Return the two pages by file name. `limits`: of log-probabilities, of a server's and of gradients."""
    exact = {name: each for name, each in found.items() if not each.refused and not any(_of_learner(each))}
    refused = {name: each for name, each in found.items() if each.refused}
    facts = head_facts(found, limits) | {"exact": len(exact), "refused": len(found) - len(exact)}
    trained = "\n".join([TRAINED.format(**facts), *table(exact)])
    lines = [REFUSED.format(**facts), *refusals(refused)]
    if unserved := dict(_unserved(exact)):
        rows = [f"| {name} | {escaped(why)} |" for name, why in unserved.items()]
        trained += "\n".join(["\n\n## Not served by vLLM on a CPU\n", "| family | why |", "|---|---|", *rows])
    if faulty := {name: each for name, each in found.items() if not each.refused and any(_of_learner(each))}:
        lines += ["\n## Refused by their certificate\n", *faults(faulty)]
    return {"models-trained.md": trained + "\n", "models-refused.md": "\n".join(lines) + "\n"}


def head_facts(found: Mapping[str, Certificate], limits: tuple[float, float, float]) -> dict[str, str | int | float]:
    """Return what the beginnings of the pages name."""
    versions = dict(sorted({item for each in found.values() for item in each.versions.items()}))
    return {
        "note": NOTE,
        "count": f"{len(found)} families and variants",
        "limit": limits[0],
        "server_limit": limits[1],
        "gradient_limit": limits[2],
        "device": next(iter(found.values())).device,
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "date": max(each.date for each in found.values()),
    }


def _of_learner(certificate: Certificate) -> Iterator[str]:
    """Faults of what the learner computes, sends and exports; not of a server."""
    return (check.fault for check in certificate.checks if check.fault and not check.what.startswith(GROUPS["vLLM"]))


def _unserved(found: Mapping[str, Certificate]) -> Iterator[tuple[str, str]]:
    """Families that vLLM does not compute as the learner does, or not at all, and why."""
    for name, certificate in found.items():
        checks = chosen(certificate.checks, GROUPS["vLLM"])
        served = any(check.figure is not None for check in checks)
        if why := next((check.fault or check.note for check in checks if check.fault or not served), ""):
            yield name, why


def table(found: Mapping[str, Certificate]) -> Iterator[str]:
    """Yield the rows of what holds."""
    yield "| family | `model_type` | " + " | ".join(GROUPS) + " |"
    yield "|---" * (2 + len(GROUPS)) + "|"
    for name, certificate in found.items():
        cells = [cell(chosen(certificate.checks, begins)) for begins in GROUPS.values()]
        yield f"| {name} | `{certificate.kind}` | " + " | ".join(cells) + " |"


def chosen(checks: Iterable[Check], begins: tuple[str, ...]) -> list[Check]:
    """Return the comparisons whose names begin so."""
    return [check for check in checks if check.what.startswith(begins)]


def cell(checks: Sequence[Check]) -> str:
    """Return the largest differences of log-probabilities and gradients. Example: `5e-06, 2e-05`"""
    if not checks:
        return "–"
    if any(check.fault for check in checks):
        return "differs" if all(check.figure is not None for check in checks) else "cannot"
    figures = [
        max((check.figure for check in checks if check.figure is not None and check.unit == unit), default=None)
        for unit in ("nat", "of its norm")
    ]
    return ", ".join(f"{figure:.0e}" for figure in figures if figure is not None) or "no"


def refusals(found: Mapping[str, Certificate]) -> Iterator[str]:
    """Yield the rows of what is refused."""
    yield "| family | why |"
    yield "|---|---|"
    yield from (
        f"| {name} | {escaped(each.refused.rpartition('; ')[0] or each.refused)} |" for name, each in found.items()
    )


def faults(found: Mapping[str, Certificate]) -> Iterator[str]:
    """Yield the rows of what was built and compared, and differs."""
    yield "| family | first fault |"
    yield "|---|---|"
    yield from (f"| {name} | {escaped(each.faults[0])} |" for name, each in found.items())


def escaped(text: str) -> str:
    """Return a text that may stand in a cell."""
    return text.replace("|", "\\|").replace("<", "&lt;")
