"""Environment variables of a run's processes: which are dropped, set and refused."""

import io
import ipaddress
import os
import pwd
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PLACE = (
    *(*RANK, "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE", "GROUP_NAME"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_*", "VLLM_DP_*"),
)
"""A process's place in a job of torchrun, PyTorchJob or vLLM, of which ours must not become members."""
OTHERS_TRAINING = ("ACCELERATE_*", "FSDP_*")
"""`accelerate launch` sets these for transformers, which with two of them makes all weights zero on every rank but the
one with LOCAL_RANK 0, and expects them from that rank later."""
READ_BY_LIBRARIES = ("TORCH*", "TRITON_*", "HF_HUB_*_TIMEOUT", "TQDM_*", "PYTHONOPTIMIZE", "PYTHONWARNINGS")
"""torch and transformers fail with some values of these."""
SWITCHES = ("", "0", "1")
INSPECT = "PYTHONINSPECT"
"""With it, Python ends with a traceback and exit code 1, or waits for its user, where a process exits by `sys.exit`."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""torchrun forwards signals to its ranks and kills ranks that do not end."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
NO_PROXY = ("no_proxy", "NO_PROXY")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
LOOPBACK_INTERFACE = "lo"
SOCKET_BYTES = 107
"""Longest path of a Unix socket."""
RAY_BYTES = 23
"""We append `/headrace-12345678/r`, because Ray opens its own folder to all users, and Ray
`/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store`."""
VLLM_BYTES = SOCKET_BYTES - 37
"""vLLM appends a slash and a UUID."""
WEIGHTS_BYTES = SOCKET_BYTES - len("/headrace-12345678/weights")
SHORT = ("/tmp", "/var/tmp", "/dev/shm")
RPC_PATH = "VLLM_RPC_BASE_PATH"
RUN_UMASK = "HEADRACE_RUN_UMASK"
MASK = re.compile("0?[0-7]{3}")


def for_children(environment: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    left_out = {key for key in environment if has_place(key) or is_others(key)} | {"PYTHONIOENCODING", INSPECT}
    kept = {key: value for key, value in environment.items() if key not in left_out}
    return kept | {"PYTHONUTF8": "1"} | around_proxy(kept, hosts) | user(kept)


def has_place(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in PLACE)


def is_others(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in OTHERS_TRAINING)


def given_to_libraries(environment: Mapping[str, str]) -> list[str]:
    """Variables with which torch or transformers may fail. They take any switch and any path."""
    return [
        name
        for name, value in environment.items()
        if any(fnmatch(name, pattern) for pattern in READ_BY_LIBRARIES)
        and not (has_place(name) or value in SWITCHES or value.startswith("/") or is_quiet(name, value))
    ]


def is_quiet(name: str, value: str) -> bool:
    """Warnings end an import only where they are made errors."""
    return name == "PYTHONWARNINGS" and "e" not in {action.strip()[:1] for action in value.split(",")}


def prepare(is_rank: bool = False, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let output work in any locale and with closed streams, reach this machine without a proxy, keep exit codes of
    children even if a shell ignores SIGCHLD, and drop variables of another training. `is_rank`: keep PLACE."""
    open_streams()
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    environment.pop(INSPECT, None)
    for name in [name for name in environment if is_others(name) or (has_place(name) and not is_rank)]:
        del environment[name]
    environment.update(around_proxy(environment) | user(environment))


def open_streams() -> None:
    """The next opened files would get the numbers of closed streams."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(number, True)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
            buffered = io.BufferedReader(stream) if number == 0 else io.BufferedWriter(stream)
            setattr(sys, name, io.TextIOWrapper(buffered, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def around_proxy(environment: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    """Libraries differ in which of `no_proxy` and `NO_PROXY` they read first."""
    if not any(environment.get(name) for name in PROXIES):
        return {}
    given = [word.strip() for name in NO_PROXY for word in environment.get(name, "").split(",")]
    line = ",".join(filter(None, dict.fromkeys([*given, *LOOPBACK, *hosts])))
    return dict.fromkeys(NO_PROXY, line)


def proxy_of(url: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The proxy for `url`; None for loopback and `no_proxy`: hosts, domains with subdomains, networks, or `*`."""
    at = urlsplit(url)
    host = at.hostname or ""
    names = [f"{at.scheme}_proxy", f"{at.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY"]
    proxy = next(filter(None, (environment.get(name) for name in names)), None)
    if proxy is None or is_loopback(host):
        return None
    words = [word.strip() for name in NO_PROXY for word in environment.get(name, "").split(",")]
    if any(_is_named(host, at.port, word) for word in words if word):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def gloo_here(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo listen on loopback, for processes of one machine: it has no authentication. Left alone, it listens
    where the machine's own name leads, often its network."""
    if LOOPBACK_INTERFACE in (name for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)


def _is_named(host: str, port: int | None, word: str) -> bool:
    if word == "*":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(word.strip("[]"), strict=False)
    name, _, number = word.lower().rpartition(":") if word.count(":") == 1 else (word.lower(), "", "")
    name = name.removeprefix("*").lstrip(".")
    return (not number or number == str(port)) and (host.lower() == name or host.lower().endswith(f".{name}"))


def user(environment: Mapping[str, str]) -> dict[str, str]:
    """torch and vLLM need USER and HOME, which a user id in containers may lack."""
    found = {}
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        if not any(environment.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
            found["USER"] = f"uid{os.getuid()}"
        if not environment.get("HOME"):
            found["HOME"] = tempfile.gettempdir()
    return found


def socket_folder(longest: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a writable folder for Unix sockets, whose path has at most `longest` bytes; None if there is none."""
    for folder in (temporary(), environment.get("XDG_RUNTIME_DIR"), *SHORT):
        if folder and len(os.fsencode(folder)) <= longest and can_write(folder):
            return folder
    return None


def temporary() -> str | None:
    """Python's temporary folder; None if no folder is writable."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return None


def can_write(folder: str | Path) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def unwritable(file: Path) -> str:
    """Why a command cannot write `file`; "" if it can. It may replace a file, never a folder or a device."""
    folder = file.absolute().parent
    if file.exists() and not file.is_file():
        return "a folder; name a file in it" if file.is_dir() else "no regular file; name another"
    if not folder.is_dir():
        return f"there is no folder {file.parent}; make it first"
    return "" if can_write(folder) else f"{folder} cannot be written to; name another file"


def apply_umask(folder: Path) -> None:
    """Give files the umask's mode: safetensors creates them with 0600, whatever the umask."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")  # `os.umask` would change it for all threads
    umask = next(int(line.split()[1], 8) for line in status.splitlines() if line.startswith("Umask:"))
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o666 & ~umask)


def run_umask(environment: Mapping[str, str] = os.environ) -> int:
    """The umask of a run's own files: 077, unless RUN_UMASK is set."""
    value = environment.get(RUN_UMASK, "")
    return int(value, 8) & 0o077 if MASK.fullmatch(value) else 0o077


def open_private(path: str | Path, flags: int) -> int:
    """An `opener` for a run's own files."""
    return os.open(path, flags, 0o666 & ~run_umask())


def private_folder(path: Path) -> None:
    """Make a folder for a run's own files, unless it is there."""
    _make_folder(path, 0o777 & ~run_umask())


def run_folder(path: Path) -> None:
    """Make a folder that users whom the umask admits may enter, not list."""
    _make_folder(path, 0o711 | 0o777 & ~run_umask())


def _make_folder(path: Path, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise


def problems(environment: Mapping[str, str] = os.environ, interfaces: bool = True, own_ray: bool = False) -> list[str]:
    """Return a line for each variable with which a run cannot work. `own_ray`: Ray is started, whose sockets have the
    longest names."""
    found = [*_folders(environment, own_ray), *_threads(environment), *_proxies(environment)]
    if (mask := environment.get(RUN_UMASK)) is not None and not MASK.fullmatch(mask):
        found.append(f"{RUN_UMASK}: {mask!r} is not a umask; write 077 for files that only you read, 027 for the group")
    return found + (list(_interfaces(environment)) if interfaces else [])


def warnings(environment: Mapping[str, str], model: str) -> list[str]:
    """Caches that cannot be written, and variables that are no longer read."""
    home = environment.get("HOME") or os.path.expanduser("~")
    caches = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
    named = {
        "VLLM_CACHE_ROOT": (f"{caches}/vllm", "what vLLM compiles"),
        "TRITON_CACHE_DIR": (f"{home}/.triton", "Triton's kernels"),
    }
    if not os.path.isdir(model):
        named["HF_HOME"] = (f"{caches}/huggingface", f"{model}, if it is not there already,")
    found = []
    for name, (default, what) in named.items():
        folder = environment.get(name) or default
        above = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
        if not can_write(above):
            asked = next((key for key in (name, "XDG_CACHE_HOME") if environment.get(key)), "HOME")
            remedy = f"{what} cannot be kept there; set {name} to a folder that can"
            found.append(f"{asked}: {folder} cannot be written, {remedy}")
    if old := environment.get("TRANSFORMERS_CACHE"):
        found.append(f"TRANSFORMERS_CACHE: {old}: transformers 5 does not read it; set HF_HOME, or HF_HUB_CACHE")
    return found


def _folders(environment: Mapping[str, str], own_ray: bool) -> Iterator[str]:
    if temporary() is None:
        named = environment.get("TMPDIR", "not set")
        yield f"TMPDIR: {named}: neither this folder nor /tmp is writable; free some space, or name another folder"
        return
    whose, most = ("Ray's", RAY_BYTES) if own_ray else ("vLLM's", VLLM_BYTES)
    if socket_folder(most, environment) is None:
        folder = temporary() or ""
        long = f"TMPDIR: {folder} has {len(os.fsencode(folder))} bytes, but {whose} sockets allow {most}"
        yield f"{long}, and none of {', '.join(SHORT)} can be written; set TMPDIR to a shorter folder"
    if path := environment.get(RPC_PATH):
        size = len(os.fsencode(path))
        if size > VLLM_BYTES:
            yield f"{RPC_PATH}: {path} has {size} bytes, but vLLM's sockets allow {VLLM_BYTES}; unset it"
        elif not can_write(path):
            yield f"{RPC_PATH}: {path} is not a writable folder; unset it, or make the folder"


def _threads(environment: Mapping[str, str]) -> Iterator[str]:
    for name in THREADS:
        value = environment.get(name)
        if value is not None and not all(word.strip().isdecimal() and int(word) > 0 for word in value.split(",")):
            yield f"{name}: {value!r} is not a number of threads; unset it, or set 1 or more"


def has_host(url: str) -> bool:
    try:
        at = urlsplit(url)
        return bool(at.hostname) and at.port != 0
    except ValueError:
        return False


def is_http(url: str) -> bool:
    return url.startswith(("http://", "https://")) and has_host(url)


def _proxies(environment: Mapping[str, str]) -> Iterator[str]:
    for name in filter(environment.get, PROXIES):
        value = environment[name]
        if not has_host(value if "://" in value else f"http://{value}"):
            yield f"{name}: {value} is not the address of a proxy; write http://HOST:PORT, or unset it"


def _interfaces(environment: Mapping[str, str]) -> Iterator[str]:
    here = [name for _, name in socket.if_nameindex()]
    for variable in filter(environment.get, INTERFACES):
        value = environment[variable]
        words = [word.strip() for word in value.lstrip("^=").split(",")]
        starts = variable == "NCCL_SOCKET_IFNAME" and not value.startswith("=")  # NCCL matches the beginning of a name
        if value.startswith("^") and variable == "NCCL_SOCKET_IFNAME":  # NCCL excludes these
            continue
        if not any(name.startswith(word) if starts else name == word for name in here for word in words if word):
            remedy = "unset it, so that the interface on the route to the other ranks is used"
            yield f"{variable}: {value} is not an interface of this machine ({', '.join(here)}); {remedy}"
