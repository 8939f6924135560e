"""vLLM's scheduler, which keeps samples until a sequence ends. Runs in vLLM's engine process.

The front process gets one output per sequence: tokens, their log-probabilities and versions. A report every 0.2 s
counts unfinished sequences.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any
from weakref import WeakValueDictionary

from rollout.engine.door.vllm_scheduler import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    SchedulerStats,
    StatLoggerBase,
)
from rollout.engine.scheduling.plain_steps import PlainSteps
from rollout.engine.scheduling.record import Record, alike

REPORT_S = 0.2
END_WAITS = 0.01
"""Finished sequences wait for at most this share of their lifetime, so that several share one message, which wakes the
front process."""


class KeepingScheduler(PlainSteps):
    """Keeps the tokens of requests that ask for log-probabilities."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rl_images: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.rl_tokens = self.rl_preempted = 0
        self.rl_stall_s, self.rl_sampled_at, self.rl_report_at, self.rl_idle = 0.0, 0.0, 0.0, True
        self.rl_ends, self.rl_ends_due, self.rl_updated_at = list[EngineCoreOutput](), inf, 0.0

    def add_request(self, request: Any) -> None:
        for image in request.mm_features or ():  # each message brings its own copy; one is kept
            image.data = self.rl_images.setdefault(image.identifier, image.data)
        for each in alike(request):
            super().add_request(each)
            if each.sampling_params is not None and each.sampling_params.logprobs is not None:
                self.rl_records[each.request_id] = Record.of(each, self.max_model_len)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        step = None if throttle_prefills else self.rl_decode()
        return super().schedule(throttle_prefills) if step is None else step

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Called for requests that end before their last token; None: all."""
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.rl_records.pop(request.request_id, None)
        return finished

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """vLLM gets the tokens without log-probabilities; what it accepts is kept."""
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        step, before = scheduler_output, self.rl_tokens
        if self.rl_block and logprobs is not None and not logprobs.cu_num_generated_tokens:
            values = logprobs.logprobs[:, 0].tolist()
            rest = self.rl_take(step, model_runner_output, values, model_runner_output.rl_version)
            self.rl_tokens += len(step.num_scheduled_tokens) - len(rest)
            step = replace(step, num_scheduled_tokens=rest)
        results: dict[int, EngineCoreOutputs] = super().update_from_output(step, model_runner_output)
        for sent in results.values():
            sent.outputs = list(self._rl_keep(sent.outputs, logprobs, model_runner_output))
        self.rl_preempted += len(scheduler_output.preempted_req_ids or ())
        if (report := self._rl_report(sampled=self.rl_tokens > before)) is not None:
            results.setdefault(0, EngineCoreOutputs()).scheduler_stats = report
        results = {
            to: sent for to, sent in results.items() if sent.outputs or sent.scheduler_stats or sent.finished_requests
        }
        step_s, self.rl_updated_at = (now := time.time()) - self.rl_updated_at, now
        if self.rl_ends and (results or not self.has_unfinished_requests() or now + step_s > self.rl_ends_due):
            results.setdefault(0, EngineCoreOutputs()).outputs += self.rl_ends
            self.rl_ends, self.rl_ends_due = [], inf
        return results

    def _rl_keep(self, outputs: list[EngineCoreOutput], logprobs: Any, step: Any) -> Iterator[EngineCoreOutput]:
        records, kept = self.rl_records, 0
        if logprobs is not None:
            values, starts = logprobs.logprobs[:, 0].tolist(), logprobs.cu_num_generated_tokens  # 0: the sampled token
            version, rows = step.rl_version, step.req_id_to_index
        for output in outputs:
            name = output.request_id
            record = records.get(name)
            if record is None:
                yield output
                continue
            if logprobs is not None and output.new_token_ids:
                row, number = rows[name], len(output.new_token_ids)
                if starts:
                    record.logprobs.extend(values[starts[row] : starts[row] + number])
                    record.versions.extend([version] * number)
                else:
                    record.logprobs.append(values[row])
                    record.versions.append(version)
                kept += number
            if output.routed_experts is not None:
                record.rows.add(output.routed_experts)
            if output.finish_reason is not None:
                del records[name]
                record.finish(output)
                now = time.time()  # the clock of vLLM's `arrival_time`
                self.rl_ends.append(output)
                self.rl_ends_due = min(self.rl_ends_due, now + END_WAITS * (now - record.request.arrival_time))
        self.rl_tokens += kept

    def has_finished_requests(self) -> bool:
        return bool(self.rl_ends) or super().has_finished_requests()

    def make_stats(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: vLLM would send its statistics at every step."""

    def _rl_report(self, sampled: bool) -> SchedulerStats | None:
        now, (running, waiting) = time.monotonic(), self.get_request_counts()
        idle = not (running + waiting)
        if sampled:
            if self.rl_sampled_at:
                self.rl_stall_s = max(self.rl_stall_s, now - self.rl_sampled_at)
            self.rl_sampled_at = now
        if idle:
            self.rl_sampled_at = 0.0
        if now < self.rl_report_at and idle == self.rl_idle:
            return None
        counts = {"tokens": self.rl_tokens, "preempted": self.rl_preempted, "stall_s": self.rl_stall_s}
        self.rl_report_at, self.rl_idle, self.rl_stall_s = now + REPORT_S, idle, 0.0
        return SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            kv_cache_usage=self.kv_cache_manager.usage,
            kv_connector_stats=counts,  # the one field of free form
        )


class KeepingAsyncScheduler(KeepingScheduler, AsyncScheduler):
    """The same where vLLM schedules a step before it has the last one's tokens."""


def scheduler(*, vllm_config: Any, **rest: Any) -> KeepingScheduler:
    """The wrong kind would cost the overlap of two steps."""
    kind = KeepingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else KeepingScheduler
    return kind(vllm_config=vllm_config, **rest)


class Reports(StatLoggerBase):
    """The newest report, in the front process. `stall_s`: the longest since it was set to 0."""

    def __init__(self) -> None:
        self.running = self.waiting = self.tokens = self.preempted = 0
        self.kv_usage = self.stall_s = 0.0
        self._sequence_s, self._since, self._until = 0.0, *2 * (time.monotonic(),)

    def record(self, scheduler_stats: SchedulerStats | None, *args: Any, **kwargs: Any) -> None:
        if scheduler_stats is None or scheduler_stats.kv_connector_stats is None:
            return
        counts = scheduler_stats.kv_connector_stats
        self._count()
        self.running, self.waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
        self.tokens, self.preempted = counts["tokens"], counts["preempted"]
        self.kv_usage, self.stall_s = scheduler_stats.kv_cache_usage, max(self.stall_s, counts["stall_s"])

    def mean_running(self) -> float:
        self._count()
        mean = self._sequence_s / max(self._until - self._since, 1e-9)
        self._sequence_s, self._since = 0.0, self._until
        return mean

    def _count(self) -> None:
        before, self._until = self._until, time.monotonic()
        self._sequence_s += self.running * (self._until - before)

    def log_engine_initialized(self) -> None:
        """Does nothing."""
