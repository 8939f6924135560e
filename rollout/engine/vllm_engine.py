"""vLLM for a rollout server: exact tokens, their log-probabilities and versions, and new weights between two steps.

vLLM runs the model in its own process; when that dies, all callers get EngineDead. `Engine.start` blocks the event loop
for tens of seconds.
"""

import asyncio
import gc
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from buffer.data.images import ImageFormat
from buffer.wire.awake import wait_awake
from configs.entrypoint import blocked
from configs.load import ConfigError
from configs.schema import Config
from rollout.engine.arguments import engine_arguments, environment, on_cpu, unserved_shapes
from rollout.engine.door.vllm_client import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineDeadError,
    LoRARequest,
    PrometheusStatLogger,
    RequestOutputKind,
    SamplingParams,
    VLLMValidationError,
    tokens_input,
)
from rollout.engine.early_process import EarlyProcess
from rollout.engine.experts.reload_trial import try_reloads
from rollout.engine.experts.returned_routes import ReturnedRoutes
from rollout.engine.image_input import image_input
from rollout.engine.joined_requests import JoinedRequests
from rollout.engine.lora.adapter_folder import NUMBER
from rollout.engine.model_overrides import overridden
from rollout.engine.scheduling.record import unpack
from rollout.engine.scheduling.scheduler import Reports
from rollout.engine.start_failure import final_failures
from rollout.errors import EngineDead, EngineError, EpisodeError
from rollout.tasks.trajectory import Completion, PlacedImage

ADAPTER = LoRARequest("policy", NUMBER, "/pushed by the learner")
"""Nothing is read from the path."""
CLOSE_S = 0.5
LOAD_FOLDER_S = 3600.0
DEAD = "vLLM's engine process died; its last log lines are above"
START_S = 600.0


class Engine:
    """One vLLM engine, made by `start`."""

    def __init__(self, llm: AsyncLLM, reports: Reports, requests: JoinedRequests) -> None:
        self._llm, self._reports, self._requests = llm, reports, requests
        self._version = self._loads = self._folders = 0
        self.tower_frozen = False
        """Whether no policy changes what sees images: then vLLM encodes an image once."""
        self.routes: ReturnedRoutes | None = None
        self._numbers = itertools.count()
        self._pausing = asyncio.Lock()
        self._last_stats = (time.monotonic(), 0)

    @classmethod
    async def start(cls, config: Config, seed: int, early: EarlyProcess | None = None) -> "Engine":
        """Start with dummy weights, or the base with an empty adapter; `early` becomes vLLM's process. Raises
        ConfigError, EngineDead."""
        cpu = on_cpu(config)
        if problems := list(unserved_shapes(config, cpu)):
            raise ConfigError(problems)
        arguments = engine_arguments(config, seed, cpu, ImageFormat.of_run(config))
        arguments["hf_overrides"] = overridden(config.model.path, arguments["hf_overrides"])
        for key, value in environment(cpu).items():
            os.environ.setdefault(key, value)
        with early.given_to_vllm(cpu) if early else nullcontext():
            engine = await cls.launch(arguments)
        engine.tower_frozen = bool(config.model.lora) or {"vision", "projector"} <= set(config.model.freeze)
        return engine

    @classmethod
    async def launch(cls, arguments: dict[str, Any]) -> "Engine":
        """Raises ConfigError for a model that cannot be given policies, or whose routes vLLM does not return;
        EngineDead."""
        reports = Reports()
        # they block SIGTERM, so they work through the drain when a job gets it
        with translate_engine_errors(), final_failures(), blocked(signal.SIGTERM):
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[lambda *_: reports])
        logging: Any = llm.logger_manager  # every output pays for vLLM's further logger
        logging.stat_loggers = [each for each in logging.stat_loggers if not isinstance(each, PrometheusStatLogger)]
        gc.collect()
        gc.freeze()  # else each full collection walks a million objects, and every token waits for it
        try:
            engine = cls(llm, reports, JoinedRequests(llm, ADAPTER if arguments.get("enable_lora") else None))
            await engine._check(bool(arguments.get("enable_return_routed_experts")))
        except BaseException:
            llm.shutdown(timeout=CLOSE_S)
            raise
        return engine

    async def _check(self, routed: bool) -> None:
        if problem := max(await self.collective("rl_refusal", timeout_s=START_S)):
            raise ConfigError([problem])
        await self.collective("rl_stamp", 0, timeout_s=START_S)
        if self._requests.adapter:  # vLLM would look for a missing adapter on the hub, and die
            await self.collective("rl_register", timeout_s=START_S)
        if kinds := (await self.collective("rl_trial_kinds", timeout_s=START_S))[0]:
            await try_reloads(self, kinds)
        if routed:
            self.routes = ReturnedRoutes(self._llm.model_config.hf_text_config.to_dict())
            try:
                await self.generate([0, 1, 2], 2, 1.0)
            except EngineDead as error:
                raise ConfigError([str(error)]) from None

    async def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int] = (),
        images: Sequence[PlacedImage] = (),
        salt: str | None = None,
        routed: int = 0,
    ) -> Completion:
        """Sample a continuation of `prompt`, up to a stop token, which is kept, or `max_tokens`.

        Log-probabilities are under `temperature`. Prompts are cached under `salt`. The first `routed` tokens need no
        routes. Raises EpisodeError for refused tokens, EngineError for other errors of this request, EngineDead.
        """
        salt = salt or self.salt

        def made() -> tuple[Any, SamplingParams]:
            parameters = sampling_parameters(max_tokens, temperature, stop_token_ids)
            parameters.routed_experts_prompt_start = routed
            return self._input(prompt, images, salt), parameters

        key = prompt, max_tokens, temperature, stop_token_ids, [id(image) for image in images], salt, routed
        try:
            end = await self._requests.end(key, made)
        except EngineDeadError as error:
            raise EngineDead(DEAD) from error
        except EngineError:
            raise
        except (ValueError, VLLMValidationError) as error:
            reason = f"vLLM refuses {len(prompt)} tokens: {error}"
            raise EpisodeError(reason, origin=type(error).__name__) from error
        except Exception as error:  # it ends that request, not the server
            reason = f"vLLM failed on {len(prompt)} tokens: {type(error).__name__}: {error}"
            raise EngineError(reason, origin=type(error).__name__) from error
        rows = len(prompt) + len(end.new_token_ids) - 1 - routed
        routes = self.routes.checked(end.routed_experts, rows) if self.routes else None
        finish: Any = str(end.finish_reason)
        return Completion(end.new_token_ids, *unpack(end), finish, routes)

    async def probe(self, tokens: list[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        """Return raw log-probabilities (temperature 1) of `tokens[1:]`."""
        parameters = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        result, name = None, f"r{next(self._numbers)}"
        with translate_engine_errors():
            given = self._input(tokens, images, self.salt)
            async for output in self._llm.generate(given, parameters, name, lora_request=self._requests.adapter):
                result = output.prompt_logprobs or result
        if result is None or len(result) != len(tokens):
            raise EngineError("vLLM gave no log-probabilities of the probe")
        return [by_token[token].logprob for token, by_token in zip(tokens[1:], result[1:], strict=True)]  # type: ignore[index]

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Stop generation while weights are received into place; unfinished sequences go on afterwards."""
        async with self._pausing:
            pause = self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            await self.call_or_death(pause, None)
            try:
                yield
            finally:
                await self.call_or_death(self._llm.resume_generation(), None)

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Return all workers' answers, by rank. Raises EngineError, or EngineDead after `timeout_s`."""
        call = self._llm.collective_rpc(method, args=args)
        try:
            answers: list[Any] = await self.call_or_death(call, timeout_s)
        except TimeoutError:
            raise EngineDead(f"vLLM's workers did not answer {method} within {timeout_s:g} s") from None
        return answers

    async def load_trial(self, changed: str, timeout_s: float) -> None:
        """Load random weights, the kind `changed` in another way (`experts/trial_weights.py`)."""
        await self.collective("rl_load_trial", changed, timeout_s=timeout_s)
        self._loads += 1

    async def load_folder(self, path: Path) -> None:
        await self.collective("rl_load_folder", str(Path(path).resolve()), timeout_s=LOAD_FOLDER_S)
        self._loads += 1
        self._folders += 1

    async def alive(self, timeout_s: float) -> None:
        """Raises EngineDead unless vLLM's process lives and its workers answer."""
        await self.collective("rl_ping", timeout_s=timeout_s)

    async def died(self) -> None:
        """Wait for the process's death; raise EngineDead."""
        handler = self._llm.output_handler
        if handler is not None:
            await asyncio.wait([handler])
        raise EngineDead(DEAD)

    @property
    def version(self) -> int:
        """Set once the workers have loaded it; what other weights cached is not used then."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        self._loads += 1

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, more than the tokenizer's words."""
        return int(self._llm.model_config.get_vocab_size())

    @property
    def longest(self) -> int:
        return int(self._llm.model_config.max_model_len)

    @property
    def tokens(self) -> int:
        return self._reports.tokens

    def stats(self) -> dict[str, float]:
        """Return vLLM's last report; means and the longest stall are since the last call."""
        (then, before), now, reports = self._last_stats, time.monotonic(), self._reports
        self._last_stats = (now, reports.tokens)
        stall_s, reports.stall_s = reports.stall_s, 0.0
        return {
            "running": reports.mean_running(),
            "waiting": float(reports.waiting),
            "tokens_per_s": (reports.tokens - before) / max(now - then, 1e-9),
            "kv_usage": reports.kv_usage,
            "preempted": float(reports.preempted),
            "stall_s": stall_s,
        }

    def sequences_by_kv(self, mean_tokens: float) -> int:
        """How many sequences the KV cache holds, with half a block to spare."""
        cache = self._llm.vllm_config.cache_config
        assert cache.num_gpu_blocks is not None
        return int(cache.num_gpu_blocks / (mean_tokens / cache.block_size + 0.5))

    async def close(self) -> None:
        self._llm.shutdown(timeout=CLOSE_S)

    async def call_or_death(self, call: Awaitable[Any], timeout_s: float | None) -> Any:
        """Raises TimeoutError, and EngineDead where vLLM would wait on."""
        with translate_engine_errors():
            answer, death = asyncio.ensure_future(call), asyncio.ensure_future(self.died())
            try:
                await wait_awake([answer, death], timeout_s)  # a stop of this process is no silence of vLLM's
                if answer.done():
                    return answer.result()
                if death.done():
                    return death.result()
                raise TimeoutError
            finally:
                for future in (answer, death):
                    future.cancel()
                await asyncio.wait([answer, death])

    @property
    def salt(self) -> str:
        """Changes with the weights, also where the version does not. A sample of several turns keeps its first salt, so
        that its history is not computed again."""
        return str(self._loads)

    def _input(self, tokens: list[int], images: Sequence[PlacedImage], salt: str) -> Any:
        if not images:
            return tokens_input(tokens, cache_salt=salt)
        names = f"folder {self._folders}" if self.tower_frozen else salt
        return image_input(tokens, images, salt, names, self._llm.model_config.dtype)


def sampling_parameters(max_tokens: int, temperature: float, stop_token_ids: Sequence[int]) -> SamplingParams:
    """Asking for log-probabilities makes our scheduler keep them."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        stop_token_ids=list(stop_token_ids),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # vLLM's deep copy takes longer than the rest of its checks
    )


@contextmanager
def translate_engine_errors() -> Iterator[None]:
    """Turn vLLM's exceptions into EngineDead and EngineError."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineDead(DEAD) from error
    except Exception as error:
        if type(error) is Exception:  # vLLM raises it when a worker's method failed
            raise EngineError(str(error)) from error
        raise
