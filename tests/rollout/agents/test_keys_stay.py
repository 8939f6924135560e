"""An agent's program gets nothing of the run's keys: no path, no key in its environment, no open file."""

import os
import sys
from pathlib import Path

from buffer.curve import LOCAL, endpoint
from buffer.keys import NAMES, load_client_keys, make_keys
from tests.rollout.agents.test_programs import agents

LOOK = """
import json, os, sys
given = json.load(sys.stdin)["secrets"]
files = []
for descriptor in os.listdir("/proc/self/fd"):
    try:
        files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        pass
texts = [*os.environ.values(), *sys.argv, *files]
print(sum(secret in text for secret in given for text in texts))
"""


async def test_an_agents_program_inherits_no_key(tmp_path: Path) -> None:
    """The server has loaded its keys, and keeps the folder open for a socket whose path is long."""
    folder = make_keys(tmp_path / ("x" * 150) / "keys")
    load_client_keys(folder, "rollout")
    assert endpoint(LOCAL, folder).startswith("ipc:///proc/self/fd/")
    secrets = [str(folder), *((folder / name).read_text().strip() for name in NAMES)]
    async with agents([sys.executable, "-c", LOOK]) as cage:
        assert await cage.run("look", secrets=secrets) == 0.0
        assert await cage.run("look", secrets=[os.environ["PATH"]]) > 0.0, "it sees what it has"
