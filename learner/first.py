"""Ends `python -m learner` in one line if torch fails with the environment variables. Imported before torch."""

import logging
import sys
from collections.abc import Sequence

from configs.entrypoint import BAD_INPUT, run_and_exit
from configs.libraries import refuse
from configs.load import ConfigError
from configs.plain_text import print_visible


def main(argv: Sequence[str]) -> int:
    """Say why the libraries cannot be imported."""
    print_visible(f"python -m learner: {refused}", sys.stderr)
    return BAD_INPUT


try:
    refuse()
except ConfigError as error:
    refused = error
    run_and_exit(main, logging.getLogger("learner"))
