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
from dataclasses import field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from configs.schema import Config
from rollout.engine.arguments import end_tokens, engine_arguments, environment, on_cpu
from rollout.episodes.episode import Completion, EpisodeError

CLOSE_S = 0.5
DEAD = "vLLM's engine process died; its last words are above"
SETTLED_TICKS = 16
"""Passes of the event loop without a new token after which nothing that vLLM sent before a pause can still be under
way: it takes up at least one chunk of what waits in each pass."""


class EngineDead(RuntimeError):
    """vLLM's process died or does not answer. Nothing but a new process helps."""


class EngineError(EpisodeError, RuntimeError):
    """vLLM refused or failed a call and lives on."""


@dataclasses.dataclass(eq=False)
class Request:
    """A request that vLLM works on. `state` is vLLM's record of it in this process, and counts its tokens."""

    state: Any = None
    replaced: list[tuple[int, int]] = field(default_factory=list)
    """Versions replaced while it ran, each with the number of tokens it had by then."""

    def tokens(self) -> int:
        """Those that have come from vLLM's process so far."""
        return self.state.detokenizer.num_output_tokens() if self.state else 0

    def versions(self, length: int, newest: int) -> list[int]:
        """The version that sampled each of `length` tokens, of which `newest` sampled what no other did."""
        versions: list[int] = []
        for tokens, version in [*self.replaced, (length, newest)]:
            versions += [version] * (tokens - len(versions))
        return versions


class Engine:
    """One vLLM engine. Made by `start`. `version` is stamped on each token; set it inside `paused`."""

    def __init__(self, llm: AsyncLLM, tokenizer: Any, eos: Sequence[int]) -> None:
        self._llm, self.tokenizer, self._eos = llm, tokenizer, tuple(eos)
        self.version = self._sampling = 0
        self.paused_s = self.stop_s = self.settle_s = self.resume_s = 0.0
        """Of the last pause, and of it: until vLLM stood still, until its last tokens were here, until it went on."""
        self._numbers = itertools.count()
        self._pausing = asyncio.Lock()
        self._runs: set[Request] = set()
        self._over = 0
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
            output_kind=RequestOutputKind.FINAL_ONLY,  # an output a token costs this process as much as all else
        )
        with self._running() as run, _deaths():
            output = (await self._final(prompt, parameters, run)).outputs[0]
            tokens, finish = list(output.token_ids), output.finish_reason
            logprobs = output.logprobs.logprobs if output.logprobs else []
            versions = run.versions(len(tokens), self._sampling)
        if finish not in ("stop", "length") or not len(tokens) == len(logprobs) == len(versions):
            raise EngineError(
                f"vLLM ended a request: {finish!r}, {len(tokens)} tokens, {len(logprobs)} log-probabilities"
            )
        return Completion(tokens, logprobs, versions, finish)  # type: ignore[arg-type]

    async def _final(self, prompt: list[int], parameters: SamplingParams, run: Request) -> Any:
        """vLLM's one answer to a request; `run` gets its record of it."""
        name = self._next_id()
        try:
            outputs = await self._llm.add_request(name, self._salted(prompt), parameters)
            run.state = self._llm.output_processor.request_states.get(outputs.request_id)  # none if it is over already
            return await outputs.get()
        except asyncio.CancelledError:
            await self._llm.abort(name)
            raise

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

        A `version` set inside holds for the tokens sampled from here on: those before are stamped with the one before,
        also if they are still on their way from vLLM's process. The prefix cache is kept, salted by version.
        """
        async with self._pausing:
            started = time.perf_counter()
            # `pause_generation` is this and a wait of 20 ms for what `_settle` makes sure of
            pause = self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            await self._living(pause, None)
            self.stop_s = time.perf_counter() - started
            settled = asyncio.ensure_future(self._settle())  # while the weights are loaded
            try:
                yield
            finally:
                await settled
                self._stamp()
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

    @property
    def tokens(self) -> int:
        """Tokens sampled so far, unfinished sequences' included."""
        return self._over + sum(run.tokens() for run in self._runs)

    def stats(self) -> dict[str, float]:
        """Sequences with and without a first token, and sampled tokens a second since the last call."""
        now, tokens = time.monotonic(), self.tokens
        rate = (tokens - self._counted) / max(now - self._counted_at, 1e-9)
        self._counted_at, self._counted = now, tokens
        running = sum(run.tokens() > 0 for run in self._runs)
        return {"running": float(running), "waiting": float(len(self._runs) - running), "tokens_per_s": rate}

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
        """Until all tokens that vLLM sent before it stood still are counted.

        It says so after them on the same socket, but takes them up in a task of its own, chunk by chunk: each pass of
        the loop brings some, so some passes without any mean that none is left.
        """
        started, idle, seen = time.perf_counter(), 0, self.tokens
        while idle < SETTLED_TICKS:
            await asyncio.sleep(0)
            tokens = self.tokens
            idle, seen = idle + 1 if seen == tokens else 0, tokens
        self.settle_s = time.perf_counter() - started

    def _stamp(self) -> None:
        """All that is counted was sampled by the version so far; from now on `version` samples."""
        if self.version != self._sampling:
            for run in self._runs:
                run.replaced.append((run.tokens(), self._sampling))
        self._sampling = self.version

    @contextmanager
    def _running(self) -> Iterator[Request]:
        run = Request()
        self._runs.add(run)
        try:
            yield run
        finally:
            self._runs.remove(run)
            self._over += run.tokens()

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
