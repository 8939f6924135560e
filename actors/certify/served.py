"""Compares a real vLLM server on the CPU with a learner's small copy of the model, pushed to it and loaded from disk.

The server scores texts and samples answers. Random texts show softcaps and scales, because no model predicts them
well. Takes about a minute.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from buffer.keys import load_client_keys, load_server_keys, make_keys
from configs.certificate import Certificate, Check, judged
from configs.load import ConfigError
from configs.schema import Config, LearnerConfig, ModelConfig
from learner.certify.certifier import ADVICE, write_copy
from learner.certify.copies import change
from learner.certify.numbers import SERVER_LIMIT, distance
from learner.certify.process import one_rank
from learner.model import loading
from learner.model.exactness import packed_row
from learner.model.idle_parts import sees
from learner.model.policy import Policy
from learner.model.shrink import VOCABULARY
from learner.model.state import use_torch_alone
from learner.saved import export
from learner.weights.receiver.follow import Receiver
from learner.weights.sender.publish import Sender
from rollout.engine.arguments import unserved_shapes
from rollout.engine.vllm_engine import Engine
from rollout.errors import EngineDead, EngineError, EpisodeError

LENGTHS = (5, 40, 17, 3, 29)
VERSIONS = 5
SAMPLED = 24
"""Tokens of an answer: longer than any window of a small copy."""
TEMPERATURE = 2.0
"""vLLM's highest. At 1 random weights are certain of nearly each token, whose log-probability is 0 at both ends."""
LEAST_UNCERTAIN = 1.0
"""Nats of all sampled tokens together, below which their comparison shows nothing."""
PUSH_S = 120.0
OPTIONS = LearnerConfig(gather="pass", activation_checkpointing="none", head_chunk_tokens=64, compile=False)
NAME = "server"
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_CI_ENV": "1"}
"""vLLM logs errors only, and warms nothing up."""
KV_BYTES = 64 << 20
SEEN = "a server of a model that sees needs its processor, which a small copy lacks; a run's probe compares it"


def with_server(certificate: Certificate, model: ModelConfig) -> Certificate:
    """Raises ConfigError for a model that no server can load."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    use_torch_alone()
    with tempfile.TemporaryDirectory(prefix="headrace-certify-") as place, one_rank() as mesh:
        folder = Path(place)
        config = run_config(write_copy(loading.read_config(model), model, folder), folder)
        if sees(loading.read_config(config.model)):
            checks: Sequence[Check] = [Check(what="server = learner", note=SEEN)]
        elif unserved := list(unserved_shapes(config, cpu=True)):
            checks = [
                Check(what="server = learner", note=unserved[0].removeprefix(f"model.path: {config.model.path}: "))
            ]
        else:
            checks = asyncio.run(compare_server(config, mesh))
    update: dict[str, Any] = {"checks": (*certificate.checks, *checks)}
    update["versions"] = certificate.versions | vllm_version()
    return certificate.model_copy(update=update | ({"remedy": ADVICE} if any(each.fault for each in checks) else {}))


def vllm_version() -> dict[str, str]:
    """Return the version of the package that brings vLLM, by its name."""
    names = packages_distributions().get("vllm", ())
    return {name: version(name) for name in dict.fromkeys(names)}


def run_config(model: ModelConfig, folder: Path) -> Config:
    """Return the part of a run file that matters here."""
    longest = 2 * max(LENGTHS)
    return Config.model_validate(
        {
            "run": {"folder": str(folder / "runs"), "name": "certify"},
            "model": model.model_dump(),
            "data": {"train": "none.parquet", "max_prompt_tokens": longest},
            "reward": {"function": "countdown"},
            "sampling": {"max_tokens": longest},
            "weights": {"bucket_mib": 1, "probe_tolerance": 1e6, "timeout_s": PUSH_S},
            "rollout": {
                "device": "cpu",
                "sequences": 8,
                "engine": {"kv_cache_memory_bytes": KV_BYTES, "max_num_seqs": 8},
            },
        }
    )


async def compare_server(config: Config, mesh: DeviceMesh) -> list[Check]:
    """Push versions, load an export, and push the same weights once more; compare each."""
    draw, checks = np.random.default_rng(5), []
    texts = [draw.integers(2, VOCABULARY, length) for length in LENGTHS]
    policy = Policy(config.model, OPTIONS, mesh)
    try:
        engine = await Engine.start(config, seed=1)
    except (ConfigError, EngineError, EngineDead, RuntimeError, ValueError) as error:
        return [
            Check(what="server = learner", fault=f"vLLM does not start with it: {' '.join(str(error).split())[:300]}")
        ]
    try:
        async with pushing(config, policy, engine) as push:
            for number in range(VERSIONS):
                await push(number)
                checks.append(await compare_texts(f"server = learner, version {number}", engine, policy, texts))
                checks.append(
                    await compare_sampled(f"server = learner, version {number}, sampled", engine, policy, texts)
                )
                change(policy)
            folder = config.run.path / "exported"
            export.write(export.collect(policy), config.model, folder)
            await engine.load_folder(folder)
            checks.append(await compare_texts("server, loaded from disk = learner", engine, policy, texts))
            await push(VERSIONS)
            checks.append(await compare_texts("server, the same weights pushed = learner", engine, policy, texts))
    except (EngineError, EngineDead, EpisodeError, TimeoutError, ValueError) as error:
        checks.append(Check(what="server = learner", fault=f"a push fails: {' '.join(str(error).split())[:300]}"))
    finally:
        await engine.close()
    return checks


async def compare_texts(what: str, engine: Engine, policy: Policy, texts: Sequence[np.ndarray]) -> Check:
    """Compare the log-probabilities of texts that the server scores at the same time with the learner's packed row."""
    found = await asyncio.gather(*(engine.probe(text.tolist()) for text in texts))
    return _judged(what, policy, texts, found)


async def compare_sampled(what: str, engine: Engine, policy: Policy, prompts: Sequence[np.ndarray]) -> Check:
    """Compare the log-probabilities with which the server samples answers to several prompts at the same time."""
    answers = await asyncio.gather(*(engine.generate(prompt.tolist(), SAMPLED, TEMPERATURE) for prompt in prompts))
    texts = [np.append(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    found = [np.asarray(answer.logprobs) for answer in answers]
    if float(-np.concatenate(found).sum()) < LEAST_UNCERTAIN:
        return Check(what=what, note="the small copy is certain of the tokens that it samples")
    return _judged(what, policy, texts, found, TEMPERATURE)


def _judged(
    what: str, policy: Policy, texts: Sequence[np.ndarray], served: Sequence[Any], temperature: float = 1.0
) -> Check:
    """`served`: log-probabilities of the last tokens of each text."""
    row = packed_row(texts)
    parts = policy.score(policy.place(row), temperature)[row.scored].split([len(text) - 1 for text in texts])
    ours = torch.cat([part[len(part) - len(each) :] for part, each in zip(parts, served, strict=True)])
    theirs = torch.tensor(np.concatenate(served), dtype=torch.float32)
    return judged(
        what, distance(theirs, ours), SERVER_LIMIT, fault="vLLM computes other log-probabilities than the learner"
    )


@asynccontextmanager
async def pushing(config: Config, policy: Policy, engine: Engine) -> AsyncIterator[Any]:
    """Yield a function that publishes a version and waits for the server."""
    keys, held = make_keys(config.run.path / "keys"), asyncio.Queue[Any]()
    options: dict[str, Any] = {"frozen": policy.frozen_names(), "keys": load_server_keys(keys, "learner")}
    # not drawn among rows of the first matrix, which may be a tower's
    options["probe"] = list(range(2, VOCABULARY // 2))
    sender = Sender(policy.weight_specs(), config.weights, 0, policy.device, **options)

    async def where(known: str | None) -> str:
        if known:
            await asyncio.Event().wait()
        return sender.address

    async def follow() -> None:
        receiver = Receiver(where, engine, NAME, config.weights, keys=load_client_keys(keys, "rollout", "learner"))
        async for each in receiver.policies():
            await each.load()
            engine.version = each.version
            await each.loaded()
            held.put_nowait(each.version)

    async def push(number: int) -> None:
        sender.publish(policy, number)
        async with asyncio.timeout(PUSH_S):
            done = await held.get()
        if isinstance(done, asyncio.Task):
            done.result()

    following = asyncio.create_task(follow())
    following.add_done_callback(held.put_nowait)  # an error ends the wait for a version
    try:
        yield push
    finally:
        following.cancel()
        sender.close()
        await asyncio.wait([following])
