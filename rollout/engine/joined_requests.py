"""Requests for samples, beside vLLM's own client: equal ones go in one message, and an end comes back as vLLM sent it.

vLLM's client (`AsyncLLM`) keeps a record of each request, for texts and tokens that come one by one, and sends each in
a message of its own, with all its images. The samples of a group begin at the same moment with the same prompt: they
are joined to one request, of which our scheduler makes so many (`scheduling/scheduler.py`). `JoinedRequests.end` waits
for the end of one of them, whose output has the whole sequence and only needs to find its caller.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rollout.engine.scheduling.record import OTHERS
from rollout.errors import EngineError

Make = Callable[[], tuple[Any, SamplingParams]]
"""vLLM's input of a request, and how it is sampled."""


@dataclass(eq=False)
class Bundle:
    """Requests with the same `key` that followed one another in a turn of the event loop."""

    key: object
    make: Make
    names: list[str] = field(default_factory=list)


class JoinedRequests:
    """The samples under way in an engine."""

    def __init__(self, llm: AsyncLLM, adapter: LoRARequest | None) -> None:
        """`adapter`: what all requests name."""
        self._llm, self.adapter, self._numbers = llm, adapter, itertools.count()
        self._waiting: dict[str, tuple[asyncio.Future[EngineCoreOutput], Bundle]] = {}
        self._coming: list[Bundle] = []
        self._sending: asyncio.Task[None] | None = None
        processor: Any = llm.output_processor
        self._rest, processor.process_outputs = processor.process_outputs, self._take
        llm._run_output_handler()
        assert llm.output_handler is not None
        llm.output_handler.add_done_callback(lambda _: self._fail([*self._waiting], EngineDeadError()))

    async def end(self, key: object, make: Make) -> EngineCoreOutput:
        """The last output of a request, with all that was sampled (`Record.finish`). `key`: what tells it from others.

        Cancelled, it aborts the request. Raises what vLLM raises for the request, EngineError for one that vLLM ended
        before its end, EngineDeadError.
        """
        if not self._coming:
            self._sending = asyncio.create_task(self._send())
        if not self._coming or self._coming[-1].key != key:
            self._coming.append(Bundle(key, make))
        name, end = f"s{next(self._numbers)}", asyncio.Future[EngineCoreOutput]()
        self._coming[-1].names.append(name)
        self._waiting[name] = end, self._coming[-1]
        try:
            return await end
        except asyncio.CancelledError:
            if self._waiting.pop(name, None):
                await self._llm.engine_core.abort_requests_async([name])
            raise

    async def _send(self) -> None:
        """Send what was asked for in this turn of the event loop, and is wanted still."""
        coming, self._coming = self._coming, []
        for bundle in coming:
            names = [name for name in bundle.names if name in self._waiting and not self._waiting[name][0].done()]
            try:
                if names:
                    await self._add(names, *bundle.make())
            except Exception as error:  # whatever vLLM raises for a request is for those who asked for it
                self._fail(names, error)

    async def _add(self, names: Sequence[str], given: Any, parameters: SamplingParams) -> None:
        first, *others = names
        parameters.extra_args = {OTHERS: others}
        tasks = await self._llm.get_supported_tasks()
        request = self._llm.input_processor.process_inputs(first, given, parameters, tasks, lora_request=self.adapter)
        await self._llm.engine_core.add_request_async(request)

    def _take(self, outputs: Sequence[EngineCoreOutput], *rest: Any, **named: Any) -> Any:
        """What vLLM calls with the outputs that its process sent; those of other requests are its own business."""
        return self._rest([output for output in outputs if not self._ended(output)], *rest, **named)

    def _ended(self, output: EngineCoreOutput) -> bool:
        """Whether `output` is the end of a sample that somebody waits for."""
        name = output.request_id
        if name not in self._waiting:
            return False
        end, bundle = self._waiting[name]
        if output.kv_transfer_params is None:  # of a message that vLLM's process cannot read it names the first alone
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
