"""A buffer that serves canned batches: answers the requests of `python -m learner` over a real socket."""

import threading
from types import TracebackType

import zmq

from buffer.wire.message import Message, pack, unpack
from buffer.wire.protocol import (
    ANSWERS,
    REQUESTS,
    Ack,
    Finished,
    Hello,
    Refused,
    Results,
    Rewind,
    Rewound,
    Take,
    Trained,
    Trial,
    Welcome,
)
from tests.harness.keys import lock_fake
from tests.harness.world import cut, make_samples


class Canned:
    """Answers Take for versions below `batches`; for later ones with `finished`, or never."""

    def __init__(self, batches: int, finished: Finished | None = None) -> None:
        self.finished = finished
        self.batches, self.requests, self.waiting = batches, [], threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        lock_fake(self._socket)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "Canned":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self._context.socket(zmq.PAIR)
        end.connect("inproc://stop")
        end.send(b"")
        self._thread.join()
        end.close()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while self._stop not in dict(poller.poll()):
            asker, data = self._socket.recv_multipart()
            number, message = unpack(data, REQUESTS)
            self.requests.append(message)
            answer = self._answer(message)
            if answer is not None:
                assert type(answer).__name__ in ANSWERS
                self._socket.send_multipart([asker, pack(number, answer)])

    def _answer(self, message: Message) -> Message | None:
        if isinstance(message, Hello):
            return Welcome(max_message=1 << 20)
        if isinstance(message, Results | Trial):
            return Ack()
        if isinstance(message, Rewind):
            return Rewound(replay=0)
        if isinstance(message, Trained):
            return Ack()
        if isinstance(message, Take):
            if message.version >= self.batches:
                self.waiting.set()
                return self.finished
            cuts = {1: [24], 2: [9, 15], 4: [3, 9, 12, 0]}[message.world]
            return cut(make_samples(message.version), message.version, cuts, message.rank)
        return Refused(reason=f"no answer is canned for {type(message).__name__}")
