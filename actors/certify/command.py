"""`python -m actors certify MODEL [--server] [--no-shared-prompts] [--text-alone] [--trust-remote-code] [--out FILE]`

Compares a small copy of a model, with random weights, in every way that a run trains and pushes it, with `--server`
also with a real vLLM server on the CPU. Exit code: 0 if everything holds, 2 if a comparison fails or the model is
refused, 1 if the certificate could not be made.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from configs.certificate import COLUMNS, Certificate, write
from configs.entrypoint import BAD_INPUT, DONE, FAILED, CommandParser, quiet_hub
from configs.load import ConfigError
from configs.model_facts import facts_of
from configs.plain_text import output, print_visible, visible_line
from configs.schema import ModelConfig
from configs.variables import unwritable

PROG = "python -m actors certify"
WIDE = 140


def main(argv: Sequence[str]) -> int:
    """Make and print a certificate; the exit code."""
    given = parser().parse_args(argv)
    quiet_hub()
    model = ModelConfig(path=given.model, trust_remote_code=given.trust_remote_code, text_alone=given.text_alone)
    if given.out and (why := unwritable(given.out)):
        print_visible(f"--out: {given.out}: {why}", sys.stderr)
        return BAD_INPUT
    facts = facts_of(model)
    if model.text_alone and facts.kind and not facts.text_alone:
        print_visible(f"--text-alone: {given.model} ({facts.kind}) is no multimodal model; leave it out", sys.stderr)
        return BAD_INPUT
    from learner.certify.process import NoCertificate, made  # imports torch

    try:
        certificate = made(model, not given.no_shared_prompts)
        if given.server and certificate.holds:
            from actors.certify.served import with_server

            certificate = with_server(certificate, model)
    except (ConfigError, NoCertificate) as error:
        print_visible(f"{PROG}: {error}", sys.stderr)
        return BAD_INPUT if isinstance(error, ConfigError) else FAILED
    try:
        if given.out:
            write(certificate, given.out)  # first: the reader of the table may leave
    finally:
        show(certificate)
    return DONE if certificate.holds else BAD_INPUT


def parser() -> CommandParser:
    """The command line."""
    made = CommandParser(PROG, description="Prove that a model is trained and served exactly.")
    made.add_argument("model", metavar="MODEL", help="a folder with config.json, or a name on the hub")
    made.add_argument("--server", action="store_true", help="also start vLLM on the CPU and push policies to it")
    made.add_argument("--no-shared-prompts", action="store_true", help="as with learner.share_prompts: false")
    made.add_argument("--text-alone", action="store_true", help="as with model.text_alone: true")
    made.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")
    made.add_argument("--out", type=Path, metavar="FILE", help="also write the certificate as JSON")
    return made


def show(certificate: Certificate, console: Console | None = None) -> None:
    """Print the table, the summary and the faults."""
    width = None if sys.stdout.isatty() else WIDE
    console = console or Console(file=output(), highlight=False, markup=False, width=width)
    if certificate.checks:
        table = Table(*COLUMNS, box=None, header_style="bold")
        for check in certificate.checks:
            table.add_row(*map(visible_line, check.cells()), style="red" if check.fault else "")
        console.print(table)
        console.print(visible_line(f"small copy: {certificate.copy_of}, {certificate.seconds:.1f} s"))
    console.print(*map(visible_line, certificate.lines()), sep="\n", soft_wrap=True)
