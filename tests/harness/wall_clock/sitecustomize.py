"""Imported by each Python with this folder on its PYTHONPATH: its wall clock is off by the seconds in `$WALL_CLOCK`.

The file is read at each call, so a clock jumps as soon as the file is written; without a file it is right. Only
`time.time` and `time.time_ns` are changed, also for modules that import them by name and for `logging`. The clock that
does not jump (`time.monotonic`) and `datetime.now` are the system's.
"""

import os
import time

_time, _time_ns = time.time, time.time_ns


def off_s():
    """Seconds by which the clock is off."""
    try:
        with open(os.environ.get("WALL_CLOCK", "")) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


def jumped_time():
    """As `time.time`."""
    return _time() + off_s()


def jumped_time_ns():
    """As `time.time_ns`."""
    return _time_ns() + off_s() * 10**9


time.time, time.time_ns = jumped_time, jumped_time_ns
