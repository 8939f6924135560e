"""A real buffer over a set of reasoning-gym whose entries take 20 ms each: an Ask waits for them, and nobody else."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

from buffer.curve import client_keys_for
from buffer.ledger.schedule import order
from buffer.wire import protocol
from buffer.wire.client import Connection, RolloutClient
from configs.load import load
from configs.resume import fingerprint
from tests.harness.ports import free_port

SIZE = 3000


def test_an_ask_waits_for_rows_and_the_buffer_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    words = [
        *(f"--model.path={tmp_path}", f"--data.train=reasoning_gym:sudoku?size={SIZE}&seed=1", "--batch.groups=64"),
        *("--reward.function=reasoning_gym", f"--run.folder={tmp_path}", "--batch.max_staleness=9"),
        f"--buffer.address=tcp://127.0.0.1:{free_port()}",
    ]
    config = load(words)
    keys = client_keys_for(config.buffer.address, config.run.path, "rollout")
    connections = [
        Connection(config.buffer.address, name, "rollout", fingerprint(config), keys=keys)
        for name in ("rollout-0", "rollout-1")
    ]
    found: list[int] = []
    waits: list[float] = []

    async def ask() -> None:
        async with connections[0] as server, connections[1] as observer:
            client = RolloutClient(server, lambda: 0)
            while len(found) < 40:
                items = await client.ask(16)
                assert items
                found.extend(item.problem["extra_info"]["reasoning_gym"]["index"] for item in items)
                start = time.monotonic()
                await observer.expect(protocol.Status(), protocol.State)
                waits.append(time.monotonic() - start)

    with subprocess.Popen([sys.executable, "-m", "buffer", *words]) as process:
        try:
            asyncio.run(ask())
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert found == list(order(SIZE, config.run.seed, 0, True))[: len(found)]
    assert max(waits) < 2, "seconds that the buffer did not answer"
