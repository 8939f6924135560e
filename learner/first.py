"""Imported by `python -m learner` before torch: variables that torch refuses end the process in one line."""

import sys

from configs.entrypoint import BAD_INPUT
from configs.libraries import import_all
from configs.load import ConfigError
from configs.plain_text import print_visible

try:
    import_all()
except ConfigError as error:
    print_visible(f"python -m learner: {error}", sys.stderr)
    sys.exit(BAD_INPUT)
