"""vLLM as a rollout server needs it: exact tokens, their log-probabilities, the version that sampled each, and pauses
that lose nothing.

`Engine.start` blocks the event loop for the tens of seconds that vLLM takes. `generate` waits for vLLM's tokens,
`paused` for the engine to finish its current step. vLLM runs the model in a process of its own; when that dies, all
callers get EngineDead.
"""

import asyncio
import dataclasses
import gc
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from configs.schema import Config
from learner.weights.receiver.staged import PauseTimings
from rollout.engine.arguments import engine_arguments, environment, on_cpu
from rollout.errors import EngineDead, EngineError, EpisodeError
from rollout.tasks.trajectory import Completion

CLOSE_S = 0.5
LOAD_FOLDER_S = 3600.0
DEAD = "vLLM's engine process died; its last log lines are above"
IDLE_PASSES = 16
"""Passes of the event loop without a new token after which no token that vLLM sent before a pause can still be on its
way: in each pass vLLM's front end takes at least one chunk off its socket."""


@dataclasses.dataclass(eq=False)
class Request:
    """A request that vLLM works on. `state` is vLLM's record of it in this process, which counts its tokens."""

    state: Any = None
    boundaries: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """For each version replaced while the request ran: how many tokens it had by then, and that version."""

    def num_tokens(self) -> int:
        """Tokens that have arrived from vLLM's process so far."""
        return self.state.detokenizer.num_output_tokens() if self.state else 0

    def versions(self, length: int, newest: int) -> list[int]:
        """The version that sampled each of `length` tokens; those after the last boundary are `newest`'s."""
        versions: list[int] = []
        for num_tokens, version in [*self.boundaries, (length, newest)]:
            versions += [version] * (num_tokens - len(versions))
        return versions


class Engine:
    """One vLLM engine, made by `start`. Set `version`, which each sampled token is stamped with, inside `paused`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm, self.version, self._sampling_version = llm, 0, 0
        self._numbers = itertools.count()
        self._pausing = asyncio.Lock()
        self._requests: set[Request] = set()
        self._finished_tokens = 0
        self._last_stats = (time.monotonic(), 0)

    @classmethod
    async def start(cls, config: Config, seed: int) -> "Engine":
        """Start vLLM with dummy weights: load real ones before generating. Raises ConfigError, EngineDead."""
        cpu = on_cpu(config)
        arguments = engine_arguments(config, seed, cpu)
        for key, value in environment(cpu).items():
            os.environ.setdefault(key, value)
        with translate_engine_errors():
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        gc.collect()
        gc.freeze()  # else each full collection walks a million objects of torch and vLLM, and every token waits for it
        return cls(llm)

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """Sample a continuation of `prompt` up to a stop token, which is kept, or `max_tokens`.

        Log-probabilities are those of the sampled tokens under `temperature`. If cancelled, vLLM aborts the request.
        Whatever vLLM raises for this request alone ends this request alone. Raises EpisodeError for tokens that vLLM
        refuses, EngineError for any other error, EngineDead.
        """
        name, request = f"r{next(self._numbers)}", Request()
        self._requests.add(request)
        try:
            parameters = sampling_parameters(max_tokens, temperature, stop_token_ids)
            with translate_engine_errors():
                outputs = await self._llm.add_request(name, self._salted(prompt), parameters)
                request.state = self._llm.output_processor.request_states.get(outputs.request_id)  # None once finished
                final: Any = await outputs.get()
            output = final.outputs[0]
            versions = request.versions(len(output.token_ids), self._sampling_version)
        except asyncio.CancelledError:
            await self._llm.abort(name)
            raise
        except (EngineDead, EngineError):
            raise
        except (ValueError, VLLMValidationError) as error:  # the latter is a ValueError before vLLM 0.32
            reason = f"vLLM refuses {len(prompt)} tokens: {error}"
            raise EpisodeError(reason, origin=type(error).__name__) from error
        except Exception as error:  # whatever vLLM raises for one request ends that request, not the server
            with translate_engine_errors():
                await self._llm.abort(name)
            reason = f"vLLM failed on {len(prompt)} tokens: {type(error).__name__}: {error}"
            raise EngineError(reason, origin=type(error).__name__) from error
        finally:
            self._requests.remove(request)
            self._finished_tokens += request.num_tokens()
        tokens, finish = list(output.token_ids), output.finish_reason
        logprobs = output.logprobs.logprobs if output.logprobs else []
        if finish not in ("stop", "length") or not len(tokens) == len(logprobs) == len(versions):
            raise EngineError(
                f"vLLM ended a request: {finish!r}, {len(tokens)} tokens, {len(logprobs)} log-probabilities"
            )
        return Completion(tokens, logprobs, versions, finish)  # type: ignore[arg-type]

    async def probe(self, tokens: list[int]) -> list[float]:
        """Raw log-probabilities (temperature 1) of `tokens[1:]`, each given those before it."""
        parameters = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        result = None
        with translate_engine_errors():
            async for output in self._llm.generate(self._salted(tokens), parameters, f"r{next(self._numbers)}"):
                result = output.prompt_logprobs or result
        if result is None or len(result) != len(tokens):
            raise EngineError("vLLM gave no log-probabilities of the probe")
        return [by_token[token].logprob for token, by_token in zip(tokens[1:], result[1:], strict=True)]  # type: ignore[index]

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[PauseTimings]:
        """Stop generation inside; unfinished sequences keep their cache and go on afterwards. The timings are complete
        once it has resumed.

        A `version` set inside holds for the tokens sampled from here on. Tokens sampled before keep the version before,
        even if they are still on their way from vLLM's process. The prefix cache is kept, salted by version.
        """
        async with self._pausing:
            timings, started = PauseTimings(), time.perf_counter()
            # `pause_generation` is this call and 20 ms of waiting for what `drain_pending_outputs` makes sure of
            pause = self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            await self.call_or_death(pause, None)
            timings.stop_s = time.perf_counter() - started
            draining = asyncio.ensure_future(self.drain_pending_outputs(timings))  # while the weights are loaded
            try:
                yield timings
            finally:
                await draining
                self.mark_version_boundary()
                resuming = time.perf_counter()
                await self.call_or_death(self._llm.resume_generation(), None)
                timings.resume_s = time.perf_counter() - resuming
                timings.paused_s = time.perf_counter() - started

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of every worker; their answers, by rank. Raises EngineDead if they take longer, EngineError."""
        call = self._llm.collective_rpc(method, args=args)
        try:
            answers: list[Any] = await self.call_or_death(call, timeout_s)
        except TimeoutError:
            raise EngineDead(f"vLLM's workers did not answer {method} within {timeout_s:g} s") from None
        return answers

    async def load_folder(self, path: Path) -> None:
        """Load the weights of a Hugging Face folder as a published policy is loaded. Raises EngineDead, EngineError."""
        async with self.paused():
            await self.collective("rl_load_folder", str(Path(path).resolve()), timeout_s=LOAD_FOLDER_S)

    async def alive(self, timeout_s: float) -> None:
        """Return if vLLM's process lives and its workers answer. Raises EngineDead."""
        await self.collective("rl_ping", timeout_s=timeout_s)

    async def died(self) -> None:
        """Wait for the death of vLLM's process, then raise EngineDead."""
        handler = self._llm.output_handler  # the task that reads that process's outputs ends with it
        if handler is not None:
            await asyncio.wait([handler])
        raise EngineDead(DEAD)

    @property
    def vocabulary(self) -> int:
        """Token ids are below this: rows of the model's embedding, which are more than the tokenizer's words."""
        return int(self._llm.model_config.get_vocab_size())

    @property
    def tokens(self) -> int:
        """Tokens sampled so far, those of unfinished sequences included."""
        return self._finished_tokens + sum(request.num_tokens() for request in self._requests)

    def stats(self) -> dict[str, float]:
        """Sequences with and without a first token, and sampled tokens per second since the last call."""
        (then, before), now, tokens = self._last_stats, time.monotonic(), self.tokens
        self._last_stats = (now, tokens)
        running = sum(request.num_tokens() > 0 for request in self._requests)
        rate = (tokens - before) / max(now - then, 1e-9)
        waiting = float(len(self._requests) - running)
        return {"running": float(running), "waiting": waiting, "tokens_per_s": rate, "preempted": 0.0}

    def sequences_by_kv(self, mean_tokens: float) -> int:
        """How many sequences of so many tokens the KV cache holds."""
        cache = self._llm.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size / mean_tokens)

    async def close(self) -> None:
        """End vLLM's process."""
        self._llm.shutdown(timeout=CLOSE_S)  # vLLM's own 5 s end in a kill just the same

    async def call_or_death(self, call: Awaitable[Any], timeout_s: float | None) -> Any:
        """The result of `call`. Raises TimeoutError, and EngineDead where vLLM, its process dead, would wait on."""
        with translate_engine_errors():
            answer, death = asyncio.ensure_future(call), asyncio.ensure_future(self.died())
            try:
                await asyncio.wait([answer, death], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return answer.result()
                if death.done():
                    return death.result()
                raise TimeoutError
            finally:
                for future in (answer, death):
                    future.cancel()
                await asyncio.wait([answer, death])

    async def drain_pending_outputs(self, timings: PauseTimings) -> None:
        """Wait until all tokens that vLLM sent before it stood still are counted.

        vLLM acknowledges the pause after them on the same socket, but reads them in a task of its own, chunk by chunk.
        Each pass of the event loop brings some, so several passes without any mean that none is left.
        """
        started, idle, seen = time.perf_counter(), 0, self.tokens
        while idle < IDLE_PASSES:
            await asyncio.sleep(0)
            tokens = self.tokens
            idle, seen = idle + 1 if seen == tokens else 0, tokens
        timings.settle_s = time.perf_counter() - started

    def mark_version_boundary(self) -> None:
        """The tokens counted so far are the previous version's; those from now on are `version`'s."""
        if self.version != self._sampling_version:
            for request in self._requests:
                request.boundaries.append((request.num_tokens(), self._sampling_version))
        self._sampling_version = self.version

    def _salted(self, tokens: list[int]) -> Any:
        return {"prompt_token_ids": tokens, "cache_salt": str(self.version)}


def sampling_parameters(max_tokens: int, temperature: float, stop_token_ids: Sequence[int]) -> SamplingParams:
    """How vLLM samples a completion: with the log-probability of each sampled token, in one output at the end."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        stop_token_ids=list(stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,  # one output per token would double this process's work
    )


@contextmanager
def translate_engine_errors() -> Iterator[None]:
    """Turn vLLM's exceptions into EngineDead and EngineError."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineDead(DEAD) from error
    except Exception as error:
        if type(error) is Exception:  # what vLLM raises when a worker's method failed
            raise EngineError(str(error)) from error
        raise
