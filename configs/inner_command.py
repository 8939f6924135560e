"""The command line of a module that other processes start: fixed words, no flags."""

import sys
from collections.abc import Sequence

from configs.plain_text import print_visible


def inner_words(*names: str, optional: Sequence[str] = (), further: str = "") -> list[str]:
    """`--help` prints the docstring of the module that runs."""
    main, given = sys.modules["__main__"], sys.argv[1:]
    prog = f"python -m {main.__spec__.name.removesuffix('.__main__')}" if main.__spec__ else f"python {main.__file__}"
    usage = " ".join([prog, *names, *(f"[{name}]" for name in optional), *([f"[{further} ...]"] if further else [])])
    if {"-h", "--help"} & {*given}:
        print_visible(f"usage: {usage}\n\n{(main.__doc__ or '').strip()}")
        sys.exit(0)
    flags = [word for word in given if word.startswith("--")]
    most = len(given) if further else len(names) + len(optional)
    if flags or not len(names) <= len(given) <= most:
        wrong = f"{flags[0]}: no such flag" if flags else f"{len(given)} words"
        print_visible(f"{prog}: {' '.join(wrong.split())[:200]}; usage: {usage}", sys.stderr)
        sys.exit(2)
    return given
