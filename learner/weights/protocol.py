"""Messages and sockets of the weights wire. Learner rank 0 listens (ROUTER), each rollout server connects (DEALER).

    server:   Join -> ServerWelcome, and once its workers have allocated room: Join -> Joined
    learner:  Offer -> Ready, then Go and the broadcast; Checksums -> Received; Probe -> Loaded; or Failed instead of
              any. Checksums and Probe are sent as soon as they are known
    learner:  Cancel: the round is off.   Rejoin: you are not a member
    server:   Hold, in place of Ready or between rounds; Release ends that

Round numbers grow, also across restarts of the learner. A message about another round is stale: only a heartbeat.
"""

from typing import Annotated

import msgpack
import zmq
import zmq.asyncio
from pydantic import Field
from zmq.auth.thread import ThreadAuthenticator

from buffer.curve import identify, judge_connections
from buffer.keys import ClientKeys, ServerKeys
from buffer.wire.message import (
    MOST_RANKS,
    MOST_WORKERS,
    Checksum,
    Count,
    Flag,
    LongName,
    Many,
    Measured,
    Message,
    Name,
    Seconds,
    Text,
    VersionOrNone,
    open_map,
    validate,
)

PROTOCOL = 8
BEATS = 5
"""Missed heartbeats before a peer counts as dead."""
MAX_BYTES = 64 << 20
"""A ServerWelcome with 10^5 tensors stays below."""
FROM_SERVERS = {zmq.MAXMSGSIZE: 1 << 16, zmq.RCVHWM: 64, zmq.SNDHWM: 256}
"""Bounds the memory that a server takes from the learner."""

# from a server


class Join(Message):
    """Admit this server. `session` and `version`: the weights it runs, which are not sent again."""

    name: Name
    protocol: Count
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)]
    backend: Flag
    digest: Name = ""
    trained: Name = ""
    session: Name = ""
    version: VersionOrNone = -1


class Ready(Message):
    """All workers are idle and wait for Go."""

    round: Count


class Hold(Message):
    """The server evaluates: no newer version until Release."""

    round: Count


class Release(Message): ...


class Received(Message):
    """All buckets have the learner's checksums."""

    round: Count
    span_s: Seconds


class Loaded(Message):
    """The server generates under the version. `probe`: mean absolute difference of log-probabilities of the first
    text."""

    round: Count
    load_s: Seconds
    pause_s: Seconds
    verify_s: Seconds
    probe: Measured | None = None


class Failed(Message):
    """`fatal`: the weights are wrong; the server exits."""

    round: Count
    reason: Text
    fatal: bool = False


class Leave(Message): ...


# from the learner


class TensorSpec(Message):
    """One tensor of the plan. Example: `TensorSpec(name="model.norm.weight", shape=[64], dtype="bfloat16")`"""

    name: LongName
    shape: Annotated[list[Count], Field(max_length=16)]
    dtype: Flag


class ServerWelcome(Message):
    """Allocate room for this plan, then Join again with the digests."""

    tensors: Many[TensorSpec]
    frozen: Many[LongName] = Field(default_factory=list)
    """Names of weights that are sent once."""
    bucket_bytes: Count
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    replicated: Many[LongName] = Field(default_factory=list)
    digest: Name
    trained: Name
    heartbeat_s: Seconds


class Joined(Message): ...


class Offer(Message):
    """A version can be sent in this round."""

    round: Count


class Checksums(Message):
    """The learner's checksum of each bucket."""

    round: Count
    checksums: Many[Checksum]


class ProbeImage(Message):
    """A picture at token `start`, which both ends draw (`probe.draw`)."""

    start: Count
    height: Count
    width: Count
    digest: Name


class ProbeText(Message):
    """Fixed tokens, and log-probabilities of the last ones at temperature 1. `tolerance`: largest mean absolute
    difference. `shift`: largest absolute mean difference."""

    name: Name
    tokens: Many[Count]
    image: ProbeImage | None = None
    logprobs: Many[float]
    tolerance: float
    shift: float


class Probe(Message):
    """All texts of the probe. The first is the one that every model predicts well."""

    round: Count = 0
    texts: Annotated[list[ProbeText], Field(min_length=1, max_length=16)]


class RankAssignment(Message):
    """Worker w is rank `offset + w` of `world`; rank 0 sends. Each learner rank below `roots` has such a group."""

    roots: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    epoch: Count
    offset: Count
    world: Count
    host: LongName
    port: Annotated[int, Field(ge=0, le=65535)]


class Go(Message):
    """Receive. `source`: the group to enter, or the folder to read."""

    round: Count
    session: Name
    version: Count
    plan: Name
    timeout_s: Seconds
    source: RankAssignment | LongName
    probe: bool = False


class Cancel(Message):
    round: Count
    reason: Text


class Rejoin(Message):
    reason: Text


class JoinRefused(Message):
    """Final: the server exits with `reason`, which is one line for people."""

    reason: Text


class Bye(Message): ...


class KeepAlive(Message): ...


class Staged(Message):
    """From a worker to its front process, after its round. `reason`: why that failed."""

    round: Count
    checksums: Many[Checksum] = Field(default_factory=list)
    span_s: Seconds = 0.0
    reason: Text = ""
    fatal: bool = False


# between the learner's ranks (`sender/mailbox.py`)


class SendRows(Message):
    """From rank 0: send your rows of `version` in the group `source`."""

    number: Count
    version: Count
    plan: Name
    timeout_s: Seconds
    source: RankAssignment


class GiveUp(Message):
    """From rank 0: groups up to `epoch` are given up."""

    epoch: Count


class RowsBegun(Message):
    """A rank has the order. A round that fails before that is no server's fault."""

    rank: Count
    number: Count


class RowsSent(Message):
    """From another rank. `refused`: it does not hold the version."""

    rank: Count
    number: Count
    reason: Text = ""
    refused: bool = False


class RowSums(Message):
    """The sums of a rank's rows (`buckets.add_up`)."""

    rank: Count
    version: Count
    plan: Name
    rows: Many[Checksum]
    columns: bytes
    """`[buckets, WORDS]` int64."""


# keys admit one role to each end, so these tables are what each may say
TO_LEARNER: dict[str, type[Message]] = {
    m.__name__: m for m in (Join, Ready, Hold, Release, Received, Loaded, Failed, Leave, KeepAlive)
}
TO_FRONT: dict[str, type[Message]] = {Staged.__name__: Staged}
TO_SERVER: dict[str, type[Message]] = {
    m.__name__: m
    for m in (ServerWelcome, Joined, Offer, Go, Checksums, Probe, Cancel, Rejoin, JoinRefused, Bye, KeepAlive)
}

TO_RANKS: dict[str, type[Message]] = {m.__name__: m for m in (SendRows, GiveUp, Bye)}
TO_RANK_0: dict[str, type[Message]] = {m.__name__: m for m in (RowsBegun, RowsSent, RowSums, Bye)}


def pack(message: Message) -> bytes:
    """One message as one frame."""
    packed: bytes = msgpack.packb({"kind": type(message).__name__, **message.model_dump()})
    return packed


def unpack(data: bytes, kinds: dict[str, type[Message]]) -> Message:
    """Undo `pack`. Raises ValueError for what is not a message of `kinds`."""
    return validate(open_map(data), kinds)


def router(
    context: zmq.asyncio.Context, host: str, keys: ServerKeys
) -> tuple[zmq.asyncio.Socket, ThreadAuthenticator, str]:
    """Bind the learner's socket to a free port of `host`; returns socket, authenticator and address."""
    socket = context.socket(zmq.ROUTER)
    _limit(socket)
    for option, value in FROM_SERVERS.items():
        socket.setsockopt(option, value)
    authenticator = judge_connections(context, socket, keys)
    bracketed = f"[{host}]" if ":" in host else host
    try:
        port = socket.bind_to_random_port(f"tcp://{bracketed}")
    except BaseException:
        socket.close()
        authenticator.stop()
        raise
    return socket, authenticator, f"tcp://{bracketed}:{port}"


def dealer(context: zmq.asyncio.Context, address: str, keys: ClientKeys) -> zmq.asyncio.Socket:
    """A server's socket to a learner with the run's key."""
    socket = context.socket(zmq.DEALER)
    _limit(socket)
    identify(socket, keys, address)
    socket.connect(address)
    return socket


def _limit(socket: zmq.asyncio.Socket) -> None:
    for option, value in {zmq.LINGER: 500, zmq.MAXMSGSIZE: MAX_BYTES, zmq.SNDHWM: 0, zmq.IPV6: 1}.items():
        socket.setsockopt(option, value)
