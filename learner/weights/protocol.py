"""The messages of the weights wire, and its sockets. The learner's rank 0 listens (ROUTER), each rollout server
connects (DEALER).

A message is one ZeroMQ frame of MessagePack: a map with `kind` and the fields of the model of that name.

    server:   Join -> ServerWelcome, and once its workers have room: Join -> Joined
    learner:  Offer -> Ready, then Go; weights are broadcast, then Received, Loaded; or Failed instead of any of them
    both:     KeepAlive, so that each notices the other's death
    learner:  Cancel: the round is off, another Offer follows.   Rejoin: you are no member (any more), Join again
    server:   Leave.   learner: Bye

Numbers of rounds grow, from one learner process to the next as well; a word about another round than the current one
is out of date and counts as a beat only.
"""

from typing import Annotated, Any, Protocol

import msgpack
import zmq
import zmq.asyncio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

PROTOCOL = 1
BEATS = 5
"""A side is taken for dead after so many missed beats."""
MAX_BYTES = 64 << 20
"""Largest message: a ServerWelcome of 10^5 tensors stays below."""
Count = Annotated[int, Field(ge=0)]


class WeightsMessage(BaseModel):
    """What every message is: frozen, no unknown fields, numbers as numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# a server's


class Join(WeightsMessage):
    """Take me in. `holds` is the session and version of the weights it runs, if any: equal ones are not sent again."""

    name: str
    protocol: int
    workers: Annotated[int, Field(ge=1)]
    backend: str
    """`nccl` or `gloo`: what its workers can receive with."""
    digest: str = ""
    """Of the plan its workers made room for; empty at first."""
    session: str = ""
    version: int = -1


class Ready(WeightsMessage):
    """All workers are free and wait for Go."""

    round: Count


class Received(WeightsMessage):
    """All buckets are here and their checksums agree; generation went on meanwhile, unless they went right into place.
    `span_s`: from when all ranks were there until all buckets were here."""

    round: Count
    receive_s: float
    span_s: float


class Loaded(WeightsMessage):
    """The server generates under the new version, and stood still for `pause_s`: until it had stopped, until the
    weights were in place (meanwhile, `settle_s`, its last tokens came), until it went on. `probe` is the mean absolute
    difference of the probe, if it was due."""

    round: Count
    stop_s: float
    settle_s: float
    load_s: float
    resume_s: float
    pause_s: float
    verify_s: float
    probe: float | None = None


class Failed(WeightsMessage):
    """It did not work. `fatal`: what came is wrong (checksum, probe, a tensor vLLM refuses); the server exits."""

    round: Count
    reason: str
    fatal: bool = False


class Leave(WeightsMessage):
    """The server ends."""


# the learner's


class TensorSpec(WeightsMessage):
    """One tensor of the plan. Example: `TensorSpec(name="model.norm.weight", shape=[64], dtype="bfloat16")`"""

    name: str
    shape: list[Count]
    dtype: str


class ServerWelcome(WeightsMessage):
    """What will be sent: make room, then Join again with the digest."""

    session: str
    """Of this start of the learner."""
    tensors: list[TensorSpec]
    bucket_bytes: Count
    digest: str
    heartbeat_s: float


class Joined(WeightsMessage):
    """You are a member: an Offer follows when there is something new for you."""

    session: str


class Offer(WeightsMessage):
    round: Count
    version: Count


class Probe(WeightsMessage):
    """Fixed tokens and the learner's log-probabilities of all but the first, at temperature 1."""

    tokens: list[int]
    logprobs: list[float]
    tolerance: float


class Go(WeightsMessage):
    """Every member said Ready. Worker w of the server is rank `offset + w` of group `epoch`; rank 0 sends. With
    `folder`, the buckets are read from files there instead."""

    round: Count
    session: str
    version: Count
    epoch: Count
    offset: Count
    world: Count
    backend: str
    host: str
    port: Count
    timeout_s: float
    folder: str = ""
    checksums: list[int]
    probe: Probe | None = None


class Cancel(WeightsMessage):
    round: Count
    reason: str


class Rejoin(WeightsMessage):
    reason: str


class JoinRefused(WeightsMessage):
    """Final: the reason is one line for people, and the server exits with it."""

    reason: str


class Bye(WeightsMessage):
    """The learner ends in good order."""


class KeepAlive(WeightsMessage):
    """I live."""


class Staged(WeightsMessage):
    """A worker to its own server's front process: the buckets of `round` are here, or why not."""

    round: Count
    worker: Count
    receive_s: float
    span_s: float = 0.0
    reason: str = ""
    fatal: bool = False


TO_LEARNER: dict[str, type[WeightsMessage]] = {
    m.__name__: m for m in (Join, Ready, Received, Loaded, Failed, Leave, KeepAlive)
}
TO_FRONT: dict[str, type[WeightsMessage]] = {Staged.__name__: Staged}
TO_SERVER: dict[str, type[WeightsMessage]] = {
    m.__name__: m for m in (ServerWelcome, Joined, Offer, Go, Cancel, Rejoin, JoinRefused, Bye, KeepAlive)
}


def pack(message: WeightsMessage) -> bytes:
    """One message as one frame."""
    packed: bytes = msgpack.packb({"kind": type(message).__name__, **message.model_dump()})
    return packed


def unpack(data: bytes, kinds: dict[str, type[WeightsMessage]]) -> WeightsMessage:
    """Undo `pack`. Raises ValueError, in one line, for what is not a message of `kinds`."""
    try:
        fields: Any = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"not MessagePack: {error or type(error).__name__}") from None
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"not a message of this wire: kind {kind!r}")
    try:
        return kinds[kind].model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{kind}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class ServingKeys(Protocol):
    """CURVE keys of the listening end, as `buffer.keys.ServerKeys` has them."""

    @property
    def public(self) -> bytes: ...
    @property
    def secret(self) -> bytes: ...
    def callback(self, domain: str, key: bytes) -> bool: ...


class AskingKeys(Protocol):
    """CURVE keys of the connecting end, as `buffer.keys.ClientKeys` has them."""

    @property
    def server_public(self) -> bytes: ...
    @property
    def public(self) -> bytes: ...
    @property
    def secret(self) -> bytes: ...


def router(context: zmq.asyncio.Context, host: str, keys: ServingKeys | None) -> tuple[zmq.asyncio.Socket, str]:
    """The learner's socket, bound to a free port of `host`, and its address."""
    socket = context.socket(zmq.ROUTER)
    _limit(socket)
    if keys:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    bracketed = f"[{host}]" if ":" in host else host
    port = socket.bind_to_random_port(f"tcp://{bracketed}")
    return socket, f"tcp://{bracketed}:{port}"


def dealer(context: zmq.asyncio.Context, address: str, keys: AskingKeys | None) -> zmq.asyncio.Socket:
    """A server's socket, connecting to `address` for as long as it takes."""
    socket = context.socket(zmq.DEALER)
    _limit(socket)
    if keys:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.connect(address)
    return socket


def _limit(socket: zmq.asyncio.Socket) -> None:
    for option, value in {zmq.LINGER: 500, zmq.MAXMSGSIZE: MAX_BYTES, zmq.SNDHWM: 0, zmq.IPV6: 1}.items():
        socket.setsockopt(option, value)
