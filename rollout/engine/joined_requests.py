"""Sends requests for samples past vLLM's client, equal ones in one message.

`AsyncLLM` sends each by itself, with all its images. A group's samples begin at the same moment: they become one
request, which our scheduler multiplies.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.engine.door.vllm_client import (
    AsyncLLM,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDeadError,
    FinishReason,
    LoRARequest,
    SamplingParams,
)
from rollout.engine.scheduling.record import OTHERS
from rollout.errors import EngineError

Make = Callable[[], tuple[Any, SamplingParams]]


@dataclass(eq=False)
class Bundle:
    """Equal requests of one turn of the event loop."""

    key: object
    make: Make
    names: list[str] = field(default_factory=list)


class JoinedRequests:
    """The samples under way in an engine."""

    def __init__(self, llm: AsyncLLM, adapter: LoRARequest | None) -> None:
        """Holds no reference to `llm`, whose process ends with it."""
        llm._run_output_handler()
        assert llm.output_handler is not None
        self.adapter, self._handler, self._numbers = adapter, llm.output_handler, itertools.count()
        self._core, self._inputs = llm.engine_core, llm.input_processor
        self._waiting: dict[str, tuple[asyncio.Future[EngineCoreOutput], Bundle]] = {}
        self._coming: list[Bundle] = []
        self._tasks = set[asyncio.Task[None]]()
        processor: Any = llm.output_processor
        self._vllm_takes, processor.process_outputs = processor.process_outputs, self._take
        self._handler.add_done_callback(lambda _: self._fail([*self._waiting], EngineDeadError()))

    async def end(self, key: object, make: Make) -> EngineCoreOutput:
        """Return the last output of a request, with all that was sampled. Requests with equal `key` are joined.

        Cancelling aborts the request. Raises vLLM's errors, EngineError if vLLM ended the request, EngineDeadError.
        """
        if self._handler.done():  # nobody takes outputs
            raise EngineDeadError
        if not self._coming:
            self._start(self._send())
        if not self._coming or self._coming[-1].key != key:
            self._coming.append(Bundle(key, make))
        name, end = f"s{next(self._numbers)}", asyncio.Future[EngineCoreOutput]()
        self._coming[-1].names.append(name)
        self._waiting[name] = end, self._coming[-1]
        try:
            return await end
        except asyncio.CancelledError:
            if self._waiting.pop(name, None):
                await self._core.abort_requests_async([name])
            raise

    async def _send(self) -> None:
        coming, self._coming = self._coming, []
        for bundle in coming:
            names = [name for name in bundle.names if name in self._waiting and not self._waiting[name][0].done()]
            try:
                if names:
                    await self._core.add_request_async(self._request(names, *bundle.make()))
            except Exception as error:  # its callers get it
                self._fail(names, error)

    def _request(self, names: Sequence[str], given: Any, parameters: SamplingParams) -> EngineCoreRequest:
        first, *others = names
        parameters.extra_args = {OTHERS: others}
        return self._inputs.process_inputs(first, given, parameters, ("generate",), lora_request=self.adapter)

    def _take(self, outputs: Sequence[EngineCoreOutput], *more: Any, **named: Any) -> Any:
        return self._vllm_takes([output for output in outputs if not self._ended(output)], *more, **named)

    def _ended(self, output: EngineCoreOutput) -> bool:
        name = output.request_id
        if name not in self._waiting:
            return False
        end, bundle = self._waiting[name]
        if output.kv_transfer_params is None or output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            # vLLM names only the first request of an unreadable message
            self._start(self._core.abort_requests_async([each for each in bundle.names if each in self._waiting]))
            reason = f"vLLM ended a request: '{output.finish_reason}', {len(output.new_token_ids)} tokens"
            self._fail(bundle.names, EngineError(reason))
        else:
            del self._waiting[name]
            if not end.done():
                end.set_result(output)
        return True

    def _fail(self, names: Sequence[str], error: Exception) -> None:
        for end, _ in [self._waiting.pop(name) for name in names if name in self._waiting]:
            if not end.done():
                end.set_exception(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)
