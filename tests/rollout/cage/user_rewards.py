"""Functions as users might write them, by accident or worse; loaded in workers as `user_rewards:load`."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def load(name, *arguments):
    """The loader: a function of this file by name, or what a `load_*` returns."""
    return globals()[name](*arguments) if name.startswith("load_") else globals()[name]


def load_exits(code):
    """Calls sys.exit while it is loaded."""
    sys.exit(code)


def load_hangs():
    """Never ends being loaded."""
    time.sleep(600)


def load_killed(folder, times):
    """Dies while it is loaded, the first `times` times."""
    attempt = len(list(Path(folder).iterdir()))
    (Path(folder) / str(attempt)).touch()
    if attempt < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return echo


def load_once(folder):
    """Can be loaded once, and then not until there is a file `mended`."""
    if (Path(folder) / "loaded").exists() and not (Path(folder) / "mended").exists():
        raise RuntimeError("not yet")
    (Path(folder) / "loaded").touch()
    return echo


def load_with_about():
    """Says of itself that it takes batches."""

    def score(x):
        return x

    score.about = {"batch": True}
    return score


def load_refused():
    """Refused in words of its own."""
    raise ValueError("reward.function: nowhere.py: no such file")


def echo(x=None):
    """Well-behaved."""
    return x


def pid():
    """The process it runs in."""
    return os.getpid()


def raises(text):
    """Prints and raises a KeyError."""
    print("printed before")
    raise KeyError(text)


def exits(code):
    """Calls sys.exit."""
    sys.exit(code)


def quits(code):
    """Ends its process with os._exit."""
    os._exit(code)


def crashes():
    """Reads address 0."""
    ctypes.string_at(0)


def kills_itself():
    """Sends itself SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def kills_its_group():
    """Sends its process group SIGKILL."""
    os.killpg(0, signal.SIGKILL)


def interrupts():
    """Raises KeyboardInterrupt."""
    raise KeyboardInterrupt


def raises_base():
    """Raises no Exception but a BaseException without a text."""

    class Odd(BaseException):
        def __str__(self):
            sys.exit(7)

    raise Odd


def raises_long():
    """Raises with five million characters."""
    raise ValueError("long\n" * 10**6)


def recurses(n=0):
    """Recurses without end."""
    return recurses(n + 1) + 1


def loops():
    """Never ends, in Python."""
    while True:
        pass


def holds_the_gil():
    """Never ends, inside a C function that holds the GIL."""
    import re

    return bool(re.match(r"(a+)+$", "a" * 60 + "b"))


def sleeps(seconds, ready=None):
    """Takes its time; writes its process id first."""
    if ready:
        Path(ready).write_text(str(os.getpid()))
    time.sleep(seconds)
    return "awake"


def leaks():
    """Keeps 8 MiB more every 5 ms."""
    kept = []
    while True:
        kept.append(b"x" * 2**23)
        time.sleep(0.005)


def allocates(gib):
    """Takes much memory at once."""
    return len(b"x" * int(gib * 2**30))


def child_leaks():
    """Takes memory in a child process."""
    subprocess.run([sys.executable, "-c", "import time; x = b'x' * 2**29; time.sleep(600)"], check=True)


def prints(mib):
    """Prints many MiB."""
    text = "x" * 1023 + "\n"
    for _ in range(mib):
        sys.stdout.write(text * 1024)
    print("the end")
    return mib


def prints_everywhere():
    """Prints from Python, from C and from a child."""
    print("from print")
    print("from stderr", file=sys.stderr)
    libc = ctypes.CDLL(None)
    libc.puts(b"from C")
    libc.fflush(None)
    subprocess.run(["echo", "from a child"], check=True)
    raise RuntimeError


def prints_without_end():
    """Never stops printing."""
    while True:
        print("again and again")


def reads_stdin():
    """Reads its standard input to the end."""
    return sys.stdin.read()


def children(folder, then):
    """Start a child, and a daemon that left session and parent; write their ids to the folder."""
    body = f"import os, time; open({folder!r} + f'/{{os.getpid()}}', 'w').close(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", body])
    daemon = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {body!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", daemon], check=True)
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    if then == "hang":
        holds_the_gil()
    if then == "quit":
        os._exit(0)
    return sorted(int(name) for name in os.listdir(folder))


def forks_without_end(folder):
    """At most 3,000 processes, should nothing stop it."""
    for _ in range(3000):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(600)


def bomb():
    """Forks 2,048 processes that fork."""
    for _ in range(11):
        os.fork()
    time.sleep(600)


def returns_from_fork():
    """Forks and returns twice."""
    os.fork()
    return os.getpid()


def leaves_thread():
    """Leaves a thread that never ends."""
    threading.Thread(target=lambda: time.sleep(600)).start()
    return threading.active_count()


def closes_output():
    """Closes its standard output."""
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    os.close(2)
    return "closed"


def closes_everything():
    """Closes every file, its connection to the server too."""
    os.closerange(3, 1000)
    return "closed"


def writes_to_its_socket():
    """Writes nonsense to every file, its connection to the server too."""
    write_nonsense()
    time.sleep(600)


def write_nonsense():
    """To every file."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            os.write(fd, b"\x00\x00\x00\x05hello" * 3)


def spoils_or_sleeps(spoils, ready=None):
    """Writes to its socket and returns, or takes its time."""
    return write_nonsense() if spoils else sleeps(0, ready)


def changes_its_world():
    """Changes folder, environment, path and signal handlers."""
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    return os.getcwd()


def leaves_alarm():
    """Leaves an alarm that goes off later."""

    def on_alarm(*_):
        raise TimeoutError("too late")

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return "set"


def removes_itself():
    """Empties its own module."""
    sys.modules.pop(__name__)
    globals().clear()


class Evil:
    """Ends the process when it is unpickled or measured."""

    def __reduce__(self):
        return os._exit, (1,)

    def __len__(self):
        sys.exit(3)


def returns(what):
    """Returns what is no plain value, or too large."""
    return {
        "nan": lambda: float("nan"),
        "large": lambda: "x" * 2**26,
        "object": Evil,
        "lambda": lambda: lambda: 0,
        "big_int": lambda: 2**100,
        "surrogate": lambda: "\ud800",
        "nested": lambda: nest(5000),
    }[what]()


def nest(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


class Strange(Exception):
    """Computes `permanent`, which raises, and has a `refused_request` that is no number."""

    refused_request = "none"

    @property
    def permanent(self):
        return 1 / 0


async def single_turn(problem, generate):
    """Well-behaved."""
    completion = await generate(problem["prompt"])
    return {"tokens": problem["prompt"] + completion["tokens"], "row": problem["row"]}


async def turns(problem, generate):
    """As many turns as the row says."""
    tokens = list(problem["prompt"])
    for turn in range(problem["row"]["turns"]):
        tokens += (await generate(tokens, max_tokens=turn + 1, stop=["\n"]))["tokens"]
    return tokens


async def misbehaves(problem, generate):
    """What the row says, after one turn."""
    await generate(problem["prompt"])
    how = problem["row"]["how"]
    if "ready" in problem["row"]:
        Path(problem["row"]["ready"]).write_text("ready")
    if how == "raise":
        raise KeyError("target")
    if how == "raise strangely":
        raise Strange("hidden")
    if how == "exit":
        sys.exit(0)
    if how == "exit in a task":
        await asyncio.create_task(exits_soon())
    if how == "exit in a group":
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(exits_soon())
    if how == "quit":
        os._exit(3)
    if how == "block":
        time.sleep(600)
    if how == "block in a task":
        await asyncio.gather(asyncio.sleep(0), blocks_soon())
    if how == "wait":
        await asyncio.sleep(600)
    if how in ("refuse to be cancelled", "refuse without output"):
        if how == "refuse without output":
            sys.stdout.close()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
    if how == "swallow once":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        await asyncio.sleep(600)
    if how == "object":
        return Evil()
    if how == "give up":
        error = RuntimeError("hopeless")
        error.permanent = True
        raise error
    if how == "pid":
        return os.getpid()
    if how == "generate":
        await generate(problem["prompt"])
    return "fine"


async def exits_soon():
    """Calls sys.exit in a task."""
    await asyncio.sleep(0)
    sys.exit(0)


async def blocks_soon():
    """Blocks the event loop in a task."""
    await asyncio.sleep(0.01)
    time.sleep(600)


async def survives_refusal(problem, generate):
    """Handles the error that `generate` raises."""
    try:
        await generate(problem["prompt"])
    except Exception as error:
        return str(error)


async def stops_waiting(problem, generate):
    """Gives `generate` 50 ms."""
    try:
        await asyncio.wait_for(generate(problem["prompt"]), 0.05)
    except TimeoutError:
        return "stopped"


def storms():
    """Eight processes hold 64 MiB each, while others come and go without end: no two looks find the same ones."""
    for _ in range(8):
        if os.fork() == 0:
            held = b"x" * 2**26
            time.sleep(600)
            print(len(held))
    for _ in range(3):
        os.fork()
    while True:
        child = os.fork()
        if child == 0:
            time.sleep(0.05)
            os._exit(0)
        os.waitpid(child, 0)
