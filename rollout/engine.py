"""vLLM as a rollout server needs it: exact tokens, their log-probabilities, the version behind each, pauses that lose
nothing.

`Engine.start` blocks the event loop for the tens of seconds that vLLM takes. `generate` waits for vLLM's tokens;
`paused` for the engine to finish its current step. vLLM runs the model in a process of its own; its death raises
EngineDead in all who wait.
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

from transformers import AutoTokenizer
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from configs.schema import Config
from rollout.arguments import end_tokens, engine_arguments, environment, on_cpu
from rollout.episode import Completion, EpisodeError

CLOSE_S = 0.5
DEAD = "vLLM's engine process died; its last words are above"
SETTLED_TICKS = 16
"""Passes of the event loop without a new token after which nothing that vLLM sent before a pause can still be under
way."""


class EngineDead(RuntimeError):
    """vLLM's process died or does not answer. Nothing but a new process helps."""


class EngineError(EpisodeError, RuntimeError):
    """vLLM refused or failed a call and lives on."""


class Engine:
    """One vLLM engine. Made by `start`. `version` is stamped on each token; set it inside `paused`."""

    def __init__(self, llm: AsyncLLM, tokenizer: Any, eos: Sequence[int]) -> None:
        self._llm, self.tokenizer, self._eos = llm, tokenizer, tuple(eos)
        self.version = 0
        self.paused_s = self.stop_s = self.resume_s = 0.0
        self._numbers = itertools.count()
        self._pausing = asyncio.Lock()
        self._running = self._waiting = self._tokens = self._chunks = 0
        self._counted_at, self._counted = time.monotonic(), 0

    @classmethod
    async def start(cls, config: Config, seed: int) -> "Engine":
        """Start vLLM on weights of no meaning: load some before generating. Raises ConfigError, EngineDead."""
        fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        arguments = engine_arguments(config, seed, fields)
        for key, value in environment(on_cpu(config)).items():
            os.environ.setdefault(key, value)
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
        with _deaths():
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        gc.collect()
        gc.freeze()  # else each full collection walks a million objects of torch and vLLM, and every token waits for it
        return cls(llm, tokenizer, end_tokens(config.model.path, tokenizer))

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """Sample on from `prompt` up to a stop token, which is kept, or `max_tokens`. Raises EngineDead, EngineError.

        Log-probabilities are those of the sampled tokens under `temperature`. If cancelled, vLLM aborts the request.
        """
        parameters = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=sorted({*self._eos, *stop_token_ids}),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish = None
        with self._counting() as count, _deaths():
            async for output in self._llm.generate(self._salted(prompt), parameters, self._next_id()):
                delta = output.outputs[0]
                tokens += delta.token_ids
                if delta.logprobs is not None:
                    logprobs += delta.logprobs.logprobs  # type: ignore[union-attr]
                versions += [self.version] * len(delta.token_ids)
                finish = delta.finish_reason
                count(len(delta.token_ids))
        if finish not in ("stop", "length") or len(logprobs) != len(tokens):
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
        with _deaths():
            async for output in self._llm.generate(self._salted(tokens), parameters, self._next_id()):
                result = output.prompt_logprobs or result
        if result is None or len(result) != len(tokens):
            raise EngineError("vLLM gave no log-probabilities of the probe")
        return [place[token].logprob for token, place in zip(tokens[1:], result[1:], strict=True)]  # type: ignore[index]

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Generation stands still inside; unfinished sequences keep their cache and go on afterwards.

        On entry every token sampled before has its version: the stamp may change. The prefix cache is kept, salted by
        version.
        """
        async with self._pausing:
            started = time.perf_counter()
            await self._living(self._llm.pause_generation(mode="keep", clear_cache=False), None)
            try:
                await self._settle()
                self.stop_s = time.perf_counter() - started
                yield
            finally:
                resuming = time.perf_counter()
                await self._living(self._llm.resume_generation(), None)
                self.resume_s = time.perf_counter() - resuming
                self.paused_s = time.perf_counter() - started

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of every worker; their answers, by rank. Raises EngineDead if they take longer, EngineError."""
        call = self._llm.collective_rpc(method, args=args)
        try:
            answers: list[Any] = await self._living(call, timeout_s)
        except TimeoutError:
            raise EngineDead(f"vLLM's workers did not answer {method} within {timeout_s:g} s") from None
        return answers

    async def load_folder(self, path: Path) -> None:
        """Load the weights of a Hugging Face folder the way a published policy is loaded. Raises EngineError."""
        async with self.paused():
            await self.collective("rl_load_folder", str(Path(path).resolve()), timeout_s=3600.0)

    async def alive(self, timeout_s: float) -> None:
        """Return if vLLM's process lives and its workers answer; raises EngineDead."""
        await self.collective("rl_ping", timeout_s=timeout_s)

    async def died(self) -> None:
        """Wait for the death of vLLM's process, then raise EngineDead."""
        handler = self._llm.output_handler  # the task that hears from that process ends with it
        if handler is not None:
            await asyncio.wait([handler])
        raise EngineDead(DEAD)

    def stats(self) -> dict[str, float]:
        """Sequences with and without a first token, and sampled tokens a second since the last call."""
        now = time.monotonic()
        rate = (self._tokens - self._counted) / max(now - self._counted_at, 1e-9)
        self._counted_at, self._counted = now, self._tokens
        return {"running": float(self._running), "waiting": float(self._waiting), "tokens_per_s": rate}

    async def close(self) -> None:
        """End vLLM's process."""
        self._llm.shutdown(timeout=CLOSE_S)  # vLLM's own 5 s end in a kill just the same

    async def _living(self, call: Awaitable[Any], timeout_s: float | None) -> Any:
        """What `call` answers; EngineDead if the process dies meanwhile (vLLM alone would wait on), TimeoutError."""
        with _deaths():
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

    async def _settle(self) -> None:
        """Until all tokens that vLLM sent before it paused have reached `generate`.

        vLLM answers the pause after them on the same socket, but hands them on in tasks of its own, chunk by chunk:
        each pass of the loop brings them nearer, so some passes without any mean that none is left.
        """
        idle = 0
        while idle < SETTLED_TICKS:
            seen = self._chunks
            await asyncio.sleep(0)
            idle = idle + 1 if seen == self._chunks else 0

    @contextmanager
    def _counting(self) -> Iterator[Any]:
        started = False
        self._waiting += 1

        def count(tokens: int) -> None:
            nonlocal started
            self._tokens += tokens
            self._chunks += 1
            if not started:
                started = True
                self._waiting, self._running = self._waiting - 1, self._running + 1

        try:
            yield count
        finally:
            if started:
                self._running -= 1
            else:
                self._waiting -= 1

    def _salted(self, tokens: list[int]) -> Any:
        return {"prompt_token_ids": tokens, "cache_salt": str(self.version)}

    def _next_id(self) -> str:
        return f"r{next(self._numbers)}"


@contextmanager
def _deaths() -> Iterator[None]:
    """vLLM's errors in our words."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineDead(DEAD) from error
    except BaseException as error:
        if type(error) is Exception:  # vLLM says so when a worker's method failed
            raise EngineError(str(error)) from error
        raise
