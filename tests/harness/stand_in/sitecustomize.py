"""Imported by each Python with this folder on its PYTHONPATH: the disk is full while the file `$FULL_DISK` exists."""

import os
import shutil

_disk_usage = shutil.disk_usage


def disk_usage(path):
    usage = _disk_usage(path)
    return usage._replace(free=0) if os.path.exists(os.environ.get("FULL_DISK", "")) else usage


shutil.disk_usage = disk_usage
