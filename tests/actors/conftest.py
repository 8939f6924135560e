"""A buffer that knows two answers, for what asks one for its State."""

import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from buffer.wire.message import pack, unpack
from buffer.wire.protocol import REQUESTS, Hello, State, Welcome
from tests.harness.keys import lock_fake

WELCOME = Welcome(max_message=1 << 20)


@pytest.fixture
def serve() -> Iterator[Callable[[State], str]]:
    """Start a buffer that knows two answers; its address."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    lock_fake(socket)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    threads = []

    def start(answer: State) -> str:
        def loop() -> None:
            try:
                while True:
                    who, frame = socket.recv_multipart()
                    number, asked = unpack(frame, REQUESTS)
                    words = WELCOME if isinstance(asked, Hello) else answer
                    socket.send_multipart([who, pack(number, words)])
            except zmq.ContextTerminated:
                pass
            finally:  # whatever ends it: the context waits for the socket
                socket.close(0)

        threads.append(threading.Thread(target=loop))
        threads[0].start()
        return f"tcp://127.0.0.1:{port}"

    yield start
    if not threads:
        socket.close(0)
    context.term()
    for thread in threads:
        thread.join()
