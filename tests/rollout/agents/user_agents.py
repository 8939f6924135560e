"""Agents as users might write them, by accident or worse: `(row, base_url, api_key)`; the row says what to do."""

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

from rollout.tasks.programs import agent_of, load_command

OPENED = open(os.devnull)  # noqa: SIM115  # a file that stays open, as a data base might


def load(name, memory="rollout.task_memory_gib (1 GiB)"):
    """The loader: an agent of this file by name, or a command."""
    if isinstance(name, list):
        return load_command(name, memory)
    return agent_of(name, globals()[name], memory, frozenset({OPENED.fileno()}))


def ask(base_url, text="2+2", **body):
    """One model call, with the standard library only."""
    data = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}], **body}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def plain(row, base_url, api_key):
    """Does what the row says, after a model call where there is a URL."""
    if base_url:
        ask(base_url)
    return WAYS[row["how"]](row, base_url)


async def concurrent(row, base_url, api_key):
    """The same in the worker's event loop."""
    if base_url:
        await asyncio.to_thread(ask, base_url)
    how = row["how"]
    if how == "wait":
        await asyncio.sleep(600)
    if how == "block":
        time.sleep(600)
    if how == "exit":
        sys.exit(3)
    if how == "pid":
        return os.getpid()
    if how == "nan":
        return float("nan")
    if how == "raise":
        raise KeyError("target")
    return {"score": 1.0, "extra": 2}


async def talking(row, chat):
    """The same as a task that sends messages; it shares its worker with others."""
    await chat([{"role": "user", "content": "2+2="}])
    if row["how"] == "wait":
        await asyncio.sleep(600)
    if row["how"] == "bad messages":
        await chat("hello")
    return WAYS[row["how"]](row, None)


def fork_bomb(row, base_url):
    for _ in range(9):
        os.fork()
    time.sleep(600)


def hog(row, base_url):
    kept = []
    while True:
        kept.append(b"x" * 2**24)


def recurse(row, base_url):
    return recurse(row, base_url) + 1


def leave_child(row, base_url):
    """A daemon that left session and parent; its id in the row's file."""
    body = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    start = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True)"
    subprocess.run([sys.executable, "-c", start, body, row["file"]], check=True)
    while not os.path.exists(row["file"]) or not open(row["file"]).read():  # noqa: SIM115
        time.sleep(0.01)
    return 1.0


def leave_and_loop(row, base_url):
    leave_child(row, base_url)
    while True:
        time.sleep(1)


def leave_socket(row, base_url):
    """A listening socket and an open connection to the server, in a process that goes on."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    if base_url:
        host, port = base_url.split("/")[2].split(":")
        connection = socket.create_connection((host, int(port)))
        connection.set_inheritable(True)
    listener.set_inheritable(True)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False, start_new_session=True)
    return {"score": 1.0, "port": listener.getsockname()[1]}


def leave_thread(row, base_url):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return 1.0


def print_much(row, base_url):
    """128 MiB of output: far more than pipes hold and logs keep."""
    line = "x" * (2**20 - 1) + "\n"
    for _ in range(128):
        sys.stdout.write(line)
    return 1.0


def close_all(row, base_url):
    os.closerange(0, 4096)
    return 1.0


def write_to_all(row, base_url):
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            os.write(fd, b"\x00\x05hello" * 9)
        except OSError:
            continue
    time.sleep(600)


def stop_itself(row, base_url):
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def stop_guard(row, base_url):
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(600)


def kill_guard(row, base_url):
    leave_child(row, base_url)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def read_for_ever(row, base_url):
    """Waits for more events than there are."""
    host, port = base_url.split("/")[2].split(":")
    body = json.dumps({"messages": [{"role": "user", "content": "2+2"}], "stream": True}).encode()
    path = base_url.split(port, 1)[1]
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while True:
            if not connection.recv(65536):
                time.sleep(0.05)


def send_garbage(row, base_url):
    host, port = base_url.split("/")[2].split(":")
    for data in (b"\x00\xff" * 1000, b"POST /e/x HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nHost: " + b"a" * 100_000):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(data)
    raise RuntimeError("sent garbage")


def use_dead_key(row, base_url):
    """A key that never was, then an error as urllib raises it."""
    return ask(base_url.replace(base_url.split("/e/")[1][:32], "0" * 32))


def answer_later(row, base_url):
    """A child asks the model once the episode has ended, and leaves the answer in the row's file."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.5)
        open(row["file"], "w").write(ask(base_url))  # noqa: SIM115
        os._exit(0)
    return 1.0


def many_processes(row, base_url):
    for _ in range(20):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    return 1.0


def removed_folder(row, base_url):
    import tempfile

    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    return 1.0


def returns_twice(row, base_url):
    """Forks and returns in both processes, in the child first."""
    child = os.fork()
    if child:
        os.waitid(os.P_PID, child, os.WEXITED)
    return 1.0


WAYS = {
    "fork": returns_twice,
    "fine": lambda row, url: {"score": 1.0, "extra": 2},
    "ask": lambda row, url: {"score": float(ask(url) == "4")},
    "loop": lambda row, url: all(iter(lambda: True, False)),
    "bomb": fork_bomb,
    "segfault": lambda row, url: ctypes.string_at(0),
    "sys.exit": lambda row, url: sys.exit(3),
    "os._exit": lambda row, url: os._exit(3),
    "quiet exit": lambda row, url: os._exit(0),
    "print": print_much,
    "nan": lambda row, url: float("nan"),
    "inf": lambda row, url: {"score": float("inf")},
    "text": lambda row, url: "one",
    "none": lambda row, url: None,
    "object": lambda row, url: object(),
    "huge": lambda row, url: "x" * 2**26,
    "socket": leave_socket,
    "thread": leave_thread,
    "child": leave_child,
    "leave and loop": leave_and_loop,
    "hog": hog,
    "recurse": recurse,
    "later": answer_later,
    "dead key": use_dead_key,
    "close": close_all,
    "write": write_to_all,
    "stop": stop_itself,
    "stop guard": stop_guard,
    "kill guard": kill_guard,
    "folder": removed_folder,
    "reader": read_for_ever,
    "garbage": send_garbage,
    "many": many_processes,
    "kill group": lambda row, url: os.killpg(0, signal.SIGKILL),
    "raise": lambda row, url: {}["target"],
    "pid": lambda row, url: os.getpid(),
    "file": lambda row, url: OPENED.closed or os.fstat(OPENED.fileno()).st_mode,
    "async": lambda row, url: asyncio.run(asyncio.sleep(0, 0.5)),
}
