"""For all tests: one thread for each process's arithmetic. Many tests start several processes on few cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
