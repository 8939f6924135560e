"""Imports of the scheduler in vLLM's engine process."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as AsyncScheduler
from vllm.v1.core.sched.interface import PauseState as PauseState
from vllm.v1.core.sched.scheduler import Scheduler as Scheduler
from vllm.v1.engine import EngineCoreOutput as EngineCoreOutput
from vllm.v1.engine import EngineCoreOutputs as EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec as FullAttentionSpec
from vllm.v1.metrics.loggers import StatLoggerBase as StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats as SchedulerStats
from vllm.v1.request import Request as Request
from vllm.v1.request import RequestStatus as RequestStatus
