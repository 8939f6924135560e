"""A disk that is really full: the buffer on a tmpfs of a few MiB, mounted for its process alone."""

import asyncio
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from buffer.wire.client import RolloutClient
from configs.load import load
from configs.resume import fingerprint
from tests.harness.buffer_process import Process, client, group, in_loop
from tests.harness.keys import give_keys

SIZE_MIB, BALLAST_MIB = 12, 8
OWN_MOUNTS = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Process, Path, "subprocess.Popen[str]"]]:
    """The buffer, the folder of its disk as seen from here, and its process."""
    it = Process(tmp_path, overrides={"rollout.heartbeat_s": 60})
    folder = tmp_path / "runs"
    folder.mkdir()
    where, keys = shlex.quote(str(folder)), shlex.quote(str(give_keys(tmp_path)))
    script = (
        f"mount -t tmpfs -o size={SIZE_MIB}m tmpfs {where} && head -c {BALLAST_MIB}M /dev/zero > {where}/ballast && "
        f"mkdir {where}/test && cp -a {keys} {where}/test && echo mounted && exec {shlex.join(it.arguments())}"
    )
    command = [*OWN_MOUNTS, "sh", "-c", script]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout
    if running.stdout.readline() != "mounted\n":
        pytest.skip(f"a disk of our own takes root or user namespaces: {running.communicate()[1].strip()}")
    yield it, Path(f"/proc/{running.pid}/root") / str(folder).lstrip("/"), running
    running.kill()
    running.communicate()


def stored(disk: Path, copy: Path) -> int:
    """Groups that the files on the disk hold, read from a copy: SQLite itself does not find its way there."""
    copy.mkdir()
    for file in ("buffer.sqlite", "buffer.sqlite-wal"):
        shutil.copyfile(disk / "test" / file, copy / file)
    with closing(sqlite3.connect(copy / "buffer.sqlite")) as db:
        (number,) = db.execute("SELECT COUNT(*) FROM items WHERE state = 'stored'").fetchone()
    return int(number)


@in_loop
async def test_a_full_disk_holds_everybody_back_until_there_is_room(small_disk):
    it, disk, running = small_disk
    print_ = fingerprint(load(it.arguments()[3:]))
    async with client(it.address, fingerprint=print_) as server:
        samples = RolloutClient(server, lambda: 0)
        items = await samples.ask(12)
        putting = [asyncio.create_task(samples.put(i, group(i.item, samples=2, tokens=20_000))) for i in items]
        _, held_back = await asyncio.wait(putting, timeout=3.0)
        assert len(held_back) > 2
        assert running.poll() is None
        async with asyncio.timeout(60):
            for look in count():  # an answer may be on its way
                done = {put for put in putting if put.done()}
                if stored(disk, it.folder / f"seen-{look}") == len(done):
                    break
                await asyncio.sleep(0.1)
        (disk / "ballast").unlink()
        assert all([(await put).accepted for put in putting])
    running.send_signal(signal.SIGTERM)
    errors = (await asyncio.to_thread(running.communicate))[1]
    assert running.returncode == 0, errors
    assert "nothing is acknowledged until this ends: make room on its disk" in errors and "test/buffer.sqlite" in errors
