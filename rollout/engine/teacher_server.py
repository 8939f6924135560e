"""`python -m rollout teacher RUN.yaml [--name teacher-0]`: a teacher server, vLLM's API server over a teacher.

The number in `--name` chooses port and teacher. Rollout servers ask over HTTP with the run's token. Runs until a
signal; exit codes: 0 ended by a signal, 1 failed, 2 refused. vLLM's processes die with it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from buffer.curve import ready
from buffer.keys import load_token
from configs.checks import check, max_sample_tokens
from configs.entrypoint import DONE, split_flags
from configs.flow.kv_room import CPU_KV_BYTES
from configs.load import read
from configs.schema import Config
from configs.teachers import key_of
from rollout.engine.arguments import HEAD, on_cpu, unknown_fields
from rollout.engine.door.leant_on import moved
from rollout.engine.model_overrides import check_served, overridden
from rollout.engine.reward_limits import HEAD_LIMITS, App
from rollout.engine.reward_server import EXTENSION, LEVEL, TokenGate, command_line, run_api_server
from rollout.engine.vllm_variables import unreadable_variables
from rollout.teachers.messages import PATH

PROG = "python -m rollout teacher"


def main(argv: Sequence[str]) -> int:
    flags, rest = split_flags(argv, PROG, name={"default": "teacher-0"})
    config = read(rest, f"{PROG} [--name teacher-0]", check_teacher_server)
    number, last = flags.name.rpartition("-")[2], len(config.teacher.served) - 1
    if not number.isdigit() or int(number) > last:
        names = f"name one of teacher-0 to teacher-{last}" if last >= 0 else "set teacher.servers"
        raise ValueError(f"--name: {flags.name} is no teacher server of this run; {names}")
    folder = ready(config.buffer.address, config.run.path)
    load_token(folder)
    cpu = on_cpu(config)
    served = arguments(config, int(number), cpu)
    TokenGate.host, TokenGate.scores, TokenGate.further = config.teacher.host, PATH, [with_scores(served["model"])]
    run_api_server(folder, command_line(served), cpu)
    return DONE


def with_scores(model: str) -> Callable[[App], App]:
    def around(app: App) -> App:
        from rollout.engine.teacher_scores import TeacherScores  # vLLM is imported once its variables are set

        return TeacherScores(model, app)

    return around


def check_teacher_server(config: Config) -> None:
    """Raise ConfigError with every contradiction."""
    check(config, files=("teacher.model",), further=[*unknown_arguments(config), *unreadable_variables(), *moved()])


def unknown_arguments(config: Config) -> list[str]:
    lines = []
    for source, each in config.teacher.teachers.items():
        key = key_of(config.teacher, source)
        lines += [
            line.replace("teacher.engine.", f"{key}.engine.", 1) for line in unknown_fields(each.engine, "teacher")
        ]
    return lines


def arguments(config: Config, number: int, cpu: bool) -> dict[str, Any]:
    """Merge our defaults, the teacher's `engine`, and what Headrace depends on."""
    source = config.teacher.served[number]
    teacher = config.teacher.teachers[source]
    defaults: dict[str, Any] = {
        "max_model_len": max_sample_tokens(config) + 1,
        "generation_config": "vllm",
        "hf_overrides": HEAD,
        "enable_prefix_caching": False,  # vLLM reads nothing from it for prompt_logprobs
    }
    defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_BYTES} if cpu else {}
    top = {} if config.teacher.top_k is None else {"max_logprobs": -1}  # a request may need more than top_k of them
    assert teacher.model is not None, "it is served"
    check_served(f"{key_of(config.teacher, source)}.model", teacher.model)
    given = {**defaults, **teacher.engine}
    return {
        **given,
        **top,
        "hf_overrides": overridden(teacher.model, given["hf_overrides"]),
        "model": teacher.model,
        "runner": "generate",
        "worker_extension_cls": EXTENSION,
        "host": config.teacher.host,
        "port": config.teacher.port + number,
        "middleware": f"{TokenGate.__module__}.TokenGate",
        "uvicorn_log_level": LEVEL,
        "disable_uvicorn_access_log": True,
        **HEAD_LIMITS,
    }
