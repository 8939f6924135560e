"""`python -m configs RUN.yaml [MORE.yaml ...] [--gpu NAME] [--section.key=value ...]`: explains and checks a run file.

Prints the run's arithmetic, its memory, speed and cost on the card, then `valid`, or everything that is wrong with exit
code 2. `--keys [SECTION]` lists keys, `--from FILE [--out RUN.yaml]` converts another system's settings. Checks and
forecast run in processes of their own, because this package imports no other one.
"""

import logging
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.checks import refuse_sft
from configs.data.sources import count_rows
from configs.entrypoint import BAD_INPUT, DONE, run_and_exit, split_flags
from configs.explain import explain
from configs.flow.cards import checked_card
from configs.flow.kv_room import gpu_bytes
from configs.help import text
from configs.load import dump, read, text_width
from configs.migration import convert
from configs.own_packages import command
from configs.plain_text import print_visible
from configs.resume import fingerprint
from configs.schema import Config

PROG = "python -m configs"


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `python -m configs RUN.yaml | head` ends quietly
    keys = {"nargs": "?", "const": ""}
    flags, rest = split_flags(argv, PROG, gpu={}, keys=keys, **{"from": {"type": Path}}, out={"type": Path})
    if flags.keys is not None:
        return _print_keys(flags.keys)
    if (source := getattr(flags, "from")) or flags.out:
        return _convert(source, flags.out, rest)
    config = read(rest, f"{PROG} [--gpu NAME | --keys [SECTION] | --from FILE [--out RUN.yaml]]", refuse_sft)
    card = checked_card(flags.gpu, PROG)
    size, which = (card.total, f"such as {card.name}") if card else (gpu_bytes(), "as this machine's")
    print_visible("\n".join(explain(config, count_rows(config.data.train), size, which)))
    price = ["actors.doctor.price", *(["--gpu", card.name] if card else [])]
    codes = [_judge(config, *price), _judge(config, "actors.doctor.run_file")]
    if not any(codes):
        print_visible(f"valid, fingerprint {fingerprint(config)}")
    return max(codes)


def _print_keys(section: str) -> int:
    try:
        print_visible(text(text_width(), section).lstrip("\n"))
    except ValueError as error:
        print_visible(f"{PROG} --keys {error}", sys.stderr)
        return BAD_INPUT
    return DONE


def _convert(source: Path | None, out: Path | None, rest: Sequence[str]) -> int:
    if source is None or rest:
        wrong = (
            f"--out: {out}: name the file to convert with --from" if source is None else f"{rest[0]}: not with --from"
        )
        print_visible(f"{PROG}: {wrong}; usage: {PROG} --from FILE [--out RUN.yaml]", sys.stderr)
        return BAD_INPUT
    return convert.main(source, out)


def _judge(config: Config, *module: str) -> int:
    return subprocess.run(command(*module), input=dump(config), encoding="utf-8").returncode


if __name__ == "__main__":
    run_and_exit(main, logging.getLogger("configs"))
