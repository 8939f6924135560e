"""Which models are trained exactly? `python -m benchmarks.models [NAME ...] [--server NAME ...]` on a CPU, 10 minutes.

Makes the certificate of each family in `families.py`, of those named with `--server` also with a real vLLM server (a
minute each), and writes benchmarks/results/models.json and docs/reference/models-*.md. With names, only these
certificates are made anew. `--page` only writes the pages.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.models.families import config_of, families, stay
from benchmarks.models.on_gpus import section
from benchmarks.models.page import pages
from benchmarks.weights.table import progress, write
from configs.certificate import Certificate, read
from configs.schema import ModelConfig
from learner.certify.certifier import certify_config
from learner.certify.numbers import GRADIENT_LIMIT, LIMIT, SERVER_LIMIT
from learner.certify.process import one_rank
from learner.certify.ranks import Pair

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
FOLDER = ROOT / "docs" / "reference"
TRAINED = "models-trained.md"


def main(argv: Sequence[str]) -> None:
    """Make certificates, the file and the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *families()])
    parser.add_argument("--server", nargs="+", default=[], metavar="NAME", choices=families())
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args(argv)
    found = kept()
    if not given.page:
        names = [*given.names] or ([] if given.server else list(families()))
        for name, each in chain(made(names), ((name, served(name)) for name in given.server)):
            keep(found := found | {name: each})
    for name, text in in_order(found).items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def in_order(found: Mapping[str, Certificate]) -> dict[str, str]:
    """Return the pages, with families by name, and with runs on GPUs."""
    made = pages(dict(sorted(found.items())), (LIMIT, SERVER_LIMIT, GRADIENT_LIMIT))
    return made | {TRAINED: made[TRAINED] + section(RESULTS.parent)}


def keep(found: Mapping[str, Certificate]) -> None:
    """Write the certificates to RESULTS."""
    write(RESULTS, "models", [{"family": name, **each.model_dump(mode="json")} for name, each in found.items()], False)


def kept() -> dict[str, Certificate]:
    """Return the certificates of the last run, by family."""
    if not RESULTS.exists():
        return {}
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    known = families()
    return {row.pop("family"): Certificate.model_validate(row) for row in rows if row["family"] in known}


def made(names: Sequence[str]) -> Iterator[tuple[str, Certificate]]:
    """Make the certificates of some families in this process; yields each with its name."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    context = multiprocessing.get_context("forkserver")  # ranks that end with an error are replaced at any time
    context.set_forkserver_preload(["learner.certify.ranks"])
    with Pair(context, stay) as pair, one_rank() as mesh:
        for name in names:
            found = certify_config(config_of(name), ModelConfig(path=name), True, mesh, pair)
            progress(f"{name}: {'; '.join(found.faults) or 'holds'} ({found.seconds:.1f} s)")
            yield name, found


def served(name: str) -> Certificate:
    """Make the certificate of a family with a real server, by the command."""
    with tempfile.TemporaryDirectory() as folder:
        config_of(name).save_pretrained(folder)
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "actors", "certify", folder, "--server", "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        found = read(out)
        if found is None:
            raise RuntimeError(f"{name}: no certificate, exit code {done.returncode}: {done.stderr[-2000:]}")
    progress(f"{name} with a server: {'; '.join(found.faults) or 'holds'} ({found.seconds:.1f} s)")
    return found.model_copy(update={"model": name})


if __name__ == "__main__":
    main(sys.argv[1:])
