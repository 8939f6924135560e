"""The keys of a run: a CURVE pair for each role, and the token that its reward and teacher servers ask for.

`<run>/keys/` (mode 0700) holds `ROLE.public` and `ROLE.secret` (mode 0600), 40 characters of Z85 each.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import zmq

Role = Literal["buffer", "learner", "rollout", "launcher", "observer"]
ROLES: tuple[Role, ...] = get_args(Role)
TOKEN = "reward.token"
NAMES = (*(f"{role}.{half}" for role in ROLES for half in ("public", "secret")), TOKEN)
Z85, TOKEN_TEXT = re.compile(rb"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]*"), re.compile(rb"[0-9a-zA-Z_-]*")
"""Characters of a key, and of the token."""
REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room on its disk") | dict.fromkeys(
    (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR), "make it writable, or name another place"
)
ANEW = "stop the run, remove {} and start it again"
OLD_NAMES = ("server.public", "server.secret", "client.public", "client.secret")
"""Files of an older Headrace."""
ADMITTED: dict[Role, tuple[Role, ...]] = {
    "buffer": ("learner", "rollout", "launcher", "observer"),
    "learner": ("rollout",),
}
READS: dict[str, tuple[str, ...]] = {
    "buffer": ("buffer.public", "buffer.secret", *(f"{role}.public" for role in ADMITTED["buffer"])),
    "learner": ("learner.public", "learner.secret", "buffer.public", "rollout.public"),
    "rollout": ("rollout.public", "rollout.secret", "buffer.public", "learner.public", TOKEN),
    "reward": (TOKEN,),
    "teacher": (TOKEN,),
}
"""What a process on another machine needs; the buffer of one machine also reads clients' secrets."""


class KeysError(ValueError):
    """Keys are of no use; the text names file and remedy."""


class NoKeys(KeysError):
    """No key file: nothing of the run has been started where this folder is."""

    pass


class Pair(NamedTuple):
    """In Z85."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class ServerKeys:
    """Keys of a process that others connect to: its own pair, and whom it admits."""

    folder: Path
    public: bytes
    secret: bytes = field(repr=False)
    clients: Mapping[bytes, Role]
    passwords: Mapping[str, str] = field(default_factory=dict, repr=False)

    def callback(self, domain: str, key: bytes) -> bool:
        """For pyzmq's authenticator, with a key in Z85."""
        return key in self.clients


@dataclass(frozen=True)
class ClientKeys:
    folder: Path
    role: Role
    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)


def make_keys(folder: Path) -> Path:
    """Make the keys of a run, unless they are there. All files appear at once or not at all, and only one of several
    processes makes them. Raises KeysError."""
    try:
        if not _has_keys(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                if not _has_keys(folder):
                    _put(folder, {role: Pair(*zmq.curve_keypair()) for role in ROLES}, secrets.token_urlsafe(32))
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "see what is in it")
        raise KeysError(f"{folder}: keys cannot be made: {error.strerror}; {remedy}") from None
    return folder


def write_keys(folder: Path, pairs: Mapping[Role, Pair], token: str) -> None:
    """`folder` is there and empty."""
    texts = {f"{role}.{half}": key for role, pair in pairs.items() for half, key in pair._asdict().items()}
    for name, key in {**texts, TOKEN: token.encode()}.items():
        write_key(folder / name, key)


def write_key(file: Path, key: bytes) -> None:
    """Only this user can read the new file."""
    with open(file, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:
        opened.write(key.strip() + b"\n")


def require_keys(folder: Path) -> None:
    """Raises KeysError."""
    for name in NAMES:
        try:
            read_key(folder / name)
        except NoKeys:
            remedy = f"remove {folder} and launch again, which makes new keys"
            raise KeysError(f"{folder / name}: no such file beside the other keys; {remedy}") from None
    for role in ROLES:
        _pair(folder, role)


def load_server_keys(folder: Path, role: Role = "buffer", passwords: bool = False) -> ServerKeys:
    """`passwords`: for a Unix socket. Raises KeysError."""
    pair, admitted = _pair(folder, role), ADMITTED[role]
    clients: dict[bytes, Role] = {_public(folder, one): one for one in admitted}
    known: dict[str, str] = {one: read_key(folder / f"{one}.secret").decode() for one in admitted if passwords}
    return ServerKeys(folder, *pair, clients, known)


def load_client_keys(folder: Path, role: Role, server: Role = "buffer") -> ClientKeys:
    """Raises KeysError."""
    return ClientKeys(folder, role, _public(folder, server), *_pair(folder, role))


def load_token(folder: Path) -> str:
    return read_key(folder / TOKEN).decode()


def read_key(path: Path) -> bytes:
    """Raises KeysError, also for a file that others can read, and for one that holds no key."""
    try:
        mode = path.stat().st_mode & 0o777
        key = path.read_bytes().strip()
    except OSError as error:
        kind = NoKeys if isinstance(error, FileNotFoundError | NotADirectoryError) else KeysError
        raise kind(f"{path}: {error.strerror}; {_remedy(path.parent)}") from None
    if mode & 0o077:
        raise KeysError(f"{path}: mode {mode:04o} lets others read the key; `chmod 600 {path}`, or make new keys")
    if len(key) != (43 if path.name == TOKEN else 40):
        raise KeysError(f"{path}: {len(key)} bytes are no key; {ANEW.format(path.parent)}")
    if not (TOKEN_TEXT if path.name == TOKEN else Z85).fullmatch(key):
        raise KeysError(f"{path}: damaged, it has characters that no key has; {ANEW.format(path.parent)}")
    return key


def _remedy(folder: Path) -> str:
    make = "`python -m actors launch` or `python -m buffer`, on the machine of the buffer"
    if any(os.path.exists(folder / name) for name in OLD_NAMES):  # False in a folder that is closed to this user
        return f"the keys there are those of an older Headrace: {make} replaces them, then copy the folder here"
    return f"keys are made by {make}: start one of them, or copy the folder from there"


def _pair(folder: Path, role: Role) -> Pair:
    return Pair(_public(folder, role), read_key(folder / f"{role}.secret"))


def _public(folder: Path, role: Role) -> bytes:
    """The public key of a role. Where its secret is too, the two are compared."""
    public, secret = folder / f"{role}.public", folder / f"{role}.secret"
    key, known = read_key(public), b""
    if secret.exists():
        hidden = read_key(secret)
        with suppress(ValueError, zmq.ZMQError):  # five characters may stand for more than four bytes
            known = zmq.curve_public(hidden)
        if key != known:
            problem = f"does not belong to {secret.name}: one of the two is damaged, or was replaced"
            raise KeysError(f"{public}: {problem}; {ANEW.format(folder)}")
    return key


def _has_keys(folder: Path) -> bool:
    """Some of them are enough."""
    return any((folder / name).exists() for name in NAMES)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _put(folder: Path, pairs: Mapping[Role, Pair], token: str) -> None:
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))  # mode 0700
    try:
        write_keys(fresh, pairs, token)
        if folder.is_dir():
            for name in OLD_NAMES:
                (folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # it holds something else, which the next line's error names
                folder.rmdir()
        fresh.rename(folder)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
