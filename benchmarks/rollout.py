"""How many tokens a second does a rollout server sample, against bare `LLM.generate` of the same vLLM? CPU or GPU.

`python -m benchmarks.rollout` keeps `--running` sequences on a server's engine, on a model of random weights
(`--shape`), with log-probabilities, a version for each token and a pause every two seconds (an empty call in place of
the load), and counts the tokens of `--seconds`. The peers, each in a process of its own in the same run: `LLM.generate`
without log-probabilities on as many sequences of the same lengths, once with vLLM's own defaults for `LLM` and once
with the server's engine arguments. Prints one table; writes JSON.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.weights.shapes import SHAPES, folder_of
from benchmarks.weights.table import ResultRow, write
from benchmarks.weights.traffic import PROMPT_TOKENS, Lag, RequestTraffic, vocabulary_of
from configs.schema import Config

PAUSE_EVERY_S = 2.0
CONTENDERS = {
    "server": "a server, its engine arguments",
    "llm": "LLM.generate, its own defaults",
    "llm-ours": "LLM.generate, the server's engine arguments",
}


def config_of(args: argparse.Namespace, folder: Path) -> Config:
    """The run file of the server."""
    return Config.model_validate({
        "model": {"path": str(folder)},
        "data": {"train": "none.parquet", "max_prompt_tokens": 2 * PROMPT_TOKENS},
        "reward": {"function": "countdown"},
        "sampling": {"max_tokens": args.length},
        "batch": {"samples": 16},
        "rollout": {"sequences": args.running, "engine": args.engine},
    })  # fmt: skip


async def serve(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """A server's engine at full load, in steady state."""
    from rollout.engine.vllm_engine import Engine

    engine = await Engine.start(config_of(args, folder), seed=1)
    traffic, lag = RequestTraffic(engine, vocabulary_of(str(folder)), args.running, args.length), Lag()
    try:
        async with asyncio.TaskGroup() as tasks:
            requests = traffic.start(tasks)
            while traffic.finished < args.running:  # until ends are spread evenly
                await asyncio.sleep(0.1)
            lag.busy()
            before, since = engine.tokens, time.monotonic()
            while time.monotonic() - since < args.seconds:
                await asyncio.sleep(PAUSE_EVERY_S)
                async with engine.paused():
                    await engine.collective("rl_ping", timeout_s=60.0)
            rate, busy = (engine.tokens - before) / (time.monotonic() - since), lag.busy()
            for request in requests:
                request.cancel()
    finally:
        await engine.close()
    return {"rate": rate, "busy": busy, "lost": float(traffic.lost)}


def generate(args: argparse.Namespace, folder: Path, ours: bool) -> dict[str, float]:
    """`LLM.generate`: the whole call, prompts included, after one call to warm up."""
    from vllm import LLM, SamplingParams

    from rollout.engine.arguments import engine_arguments, environment, on_cpu

    config = config_of(args, folder)
    cpu = on_cpu(config)
    os.environ.update(environment(cpu))
    arguments = engine_arguments(config, 1, cpu)
    kept = ("model", "dtype", "load_format", "max_model_len", "hf_overrides", "seed", "skip_tokenizer_init",
            "kv_cache_memory_bytes", "enforce_eager")  # fmt: skip
    left_out = ("worker_extension_cls", "disable_log_stats", "logprobs_mode")
    chosen = {key: value for key, value in arguments.items() if (key not in left_out if ours else key in kept)}
    llm: Any = LLM(**chosen)
    draw, vocabulary = random.Random(0), vocabulary_of(str(folder))
    lengths = SamplingParams(max_tokens=args.length, ignore_eos=True, detokenize=False)
    for number in (args.running // 8, 2 * args.running):
        prompts: Any = [
            {"prompt_token_ids": [draw.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)]} for _ in range(number)
        ]
        started = time.monotonic()
        outputs = llm.generate(prompts, lengths, use_tqdm=False)
        took = time.monotonic() - started
    return {"rate": sum(len(output.outputs[0].token_ids) for output in outputs) / took}


def contend(name: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One contender, in this process."""
    if name == "server":
        return uvloop.run(serve(args, folder))
    return generate(args, folder, ours=name == "llm-ours")


def rows_of(found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The server against each peer."""
    ours = found.pop("server")
    rows = [ResultRow("tokens/s of a server", ours["rate"], "1/s")]
    for name, peer in found.items():
        rows.append(ResultRow("tokens/s of a server", ours["rate"], "1/s", CONTENDERS[name], peer["rate"]))
    rows.append(ResultRow("front process, share of a CPU", ours["busy"], ""))
    rows.append(ResultRow("requests lost", ours["lost"], ""))
    return [row.line() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="speck", choices=SHAPES)
    parser.add_argument("--running", type=int, default=128, help="sequences, a multiple of 16")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--engine", type=json.loads, default={}, help="rollout.engine, as JSON")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--contender", choices=CONTENDERS, help="run one in this process, for the parent process")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rollout.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = folder_of(args.shape, Path(work))
        if args.contender:
            args.out.write_text(json.dumps(contend(args.contender, args, folder)))
            return 0
        found = {}
        for name in args.contenders.split(","):
            out = Path(work, f"{name}.json")
            argv = [sys.executable, "-m", "benchmarks.rollout", *sys.argv[1:], "--contender", name, "--out", str(out)]
            subprocess.run(argv, check=True, stdout=sys.stderr)
            found[name] = json.loads(out.read_text())
    write(args.out, "rollout", rows_of(found))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's objects complain when the interpreter takes them apart
