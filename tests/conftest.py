"""For all tests: one CPU thread per process, because many tests start several processes on few cores; and the same
cases of each property in every run. `--hypothesis-profile explore` draws others.
"""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")
