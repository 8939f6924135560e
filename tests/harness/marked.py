"""A real vLLM under swaps at every step, whose weights mark each log-probability with their version.

Run as a process of its own, which prints what it found as JSON: `python -m tests.harness.marked <folder> <scene>
<tensor_parallel> <enough>`, where `enough` says how often what has to happen. The scenes: `synchronous`;
`asynchronous`, which vLLM does not do on a CPU by itself; `late`, the same with a worker that makes the mistake of
reading the version when a step's output is taken; and `cuda`.

In the model every hidden state is the same vector, and the last norm's weight picks column v % 64 of the head: version
v gives token k the log-probability `TABLE[v % 64, k]`, whatever the prompt.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from configs.inner_command import inner_words
from configs.schema import Config
from rollout.engine.arguments import engine_arguments, environment
from rollout.engine.vllm_engine import Engine
from rollout.engine.worker import StampedOutput, WorkerExtension

HIDDEN, VOCABULARY, SCALE = 64, 512, 2.0
HEAD = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16().float()
TABLE = torch.log_softmax(SCALE * HEAD.T, -1)
ASKERS, STOPS, BLOCKS = 24, (7, 8, 9), 40
LONGEST_S = 90.0


class MarkedWorker(WorkerExtension):
    """Exchanges the weights as `rl_load` does: between two steps, with the stamp."""

    def rl_swap(self, version: int) -> None:
        with torch.no_grad():
            self.model_runner.get_model().model.norm.weight.copy_(norm(version))
        self.rl_stamp(version)


class LateWorker(MarkedWorker):
    """Makes the mistake."""

    def rl_spoil(self) -> None:
        sample = self.model_runner.sample_tokens

        def sample_tokens(grammar_output):
            output = sample(grammar_output)
            if isinstance(output, StampedOutput):
                taken = output.get_output
                output.get_output = lambda: (setattr(output, "version", self.rl_version), taken())[1]
            return output

        self.model_runner.sample_tokens = sample_tokens


class CpuOutput(AsyncModelRunnerOutput):
    """Stands for vLLM's output that is still on a GPU: the step has run, its tokens are taken a step later."""

    def __init__(self, model_runner_output, sampled_token_ids, logprobs_tensors, invalid_req_indices, **_):
        self.output, self.invalid = model_runner_output, list(invalid_req_indices)
        self.sampled_token_ids_cpu, self.logprobs = sampled_token_ids.clone(), logprobs_tensors
        self.async_copy_ready_event = Nothing()

    def get_output(self):
        tokens = self.sampled_token_ids_cpu.tolist()
        for row in self.invalid:
            tokens[row].clear()
        self.output.sampled_token_ids = tokens
        self.output.logprobs = self.logprobs.tolists() if self.logprobs is not None else None
        return self.output


class Nothing:
    """Stands for CUDA's streams and events."""

    device = torch.device("cpu")

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def schedule_asynchronously():
    """Make vLLM schedule a step before it has the tokens of the one before, on a CPU."""
    check = CpuPlatform.check_and_update_config

    def check_and_update_config(cls, config):
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    gpu_model_runner.AsyncGPUModelRunnerOutput = CpuOutput
    CPUModelRunner._get_or_create_async_output_copy_stream = lambda self: Nothing()


def norm(version):
    weight = torch.zeros(HIDDEN)
    weight[version % HIDDEN] = SCALE
    return weight


@torch.no_grad()
def write_model(folder):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    ends = {"bos_token_id": 1, "eos_token_id": None}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **ends, tie_word_embeddings=False)).float()
    layer = model.model.layers[0]
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        weight.zero_()
    model.model.embed_tokens.weight.fill_(1.0)
    model.lm_head.weight.copy_(HEAD)
    model.model.norm.weight.copy_(norm(0))
    model.save_pretrained(folder)


def arguments(folder, scene, tensor_parallel):
    cpu = scene != "cuda"
    config = Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32" if cpu else "bfloat16"},
            "data": {"train": "train.parquet", "max_prompt_tokens": 320},
            "reward": {"function": "countdown"},
            "sampling": {"max_tokens": 400},
            "rollout": {"device": "cpu" if cpu else "cuda", "tensor_parallel": tensor_parallel},
        }
    )
    for key, value in environment(cpu).items():
        os.environ.setdefault(key, value)
    given = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "num_gpu_blocks_override": BLOCKS, "block_size": 32}
    given |= {} if cpu else {"gpu_memory_utilization": 0.3}
    worker = "LateWorker" if scene == "late" else "MarkedWorker"
    changed = {"load_format": "auto", "worker_extension_cls": f"tests.harness.marked.{worker}"}
    return engine_arguments(config, 1, cpu) | given | changed


class Scene:
    """Many sequences on one engine; `found` counts what was seen of them."""

    def __init__(self, engine, enough):
        self.engine, self.enough = engine, enough
        self.draw, self.found, self.over = random.Random(1), Counter(), False

    async def ask(self, aborts):
        """One sequence, or three that ask for the same; one of ten times one is given up if `aborts`."""
        draw, found = self.draw, self.found
        prompt = [draw.randrange(10, 500) for _ in range(draw.choice([3, 20, 300]))]
        length, stops, number = draw.choice([1, 2, 30, 120, 400]), STOPS * (draw.random() < 0.5), draw.choice([1, 1, 3])
        asked = [asyncio.create_task(self.engine.generate(prompt, length, 1.0, stops)) for _ in range(number)]
        if aborts and draw.random() < 0.1:
            await asyncio.wait(asked, timeout=0.3 * draw.random())
            found["aborted"] += asked[-1].cancel()
        await asyncio.wait(asked)
        found["joined"] += number > 1
        for each in asked:
            if not each.cancelled():
                self.judge(each.result(), length)

    def judge(self, got, length):
        """Every token by its log-probability."""
        found, expected = self.found, TABLE[torch.tensor(got.versions) % HIDDEN, torch.tensor(got.tokens)]
        found["wrong"] += int(((expected - torch.tensor(got.logprobs)).abs() > 1e-3).sum())
        found["backwards"] += list(got.versions) != sorted(got.versions)
        found["crossed"] += got.versions[0] != got.versions[-1]
        found["misshapen"] += not len(got.tokens) == len(got.logprobs) == len(got.versions)
        found["misended"] += len(got.tokens) != length if got.finish == "length" else got.tokens[-1] not in STOPS
        found["stopped"] += got.finish == "stop"
        found["tokens"] += len(got.tokens)
        found["done"] += 1

    async def keep_asking(self):
        while not self.over:
            await self.ask(aborts=True)

    async def play(self):
        await self.ask(aborts=False)  # the first steps compile
        asking = [asyncio.create_task(self.keep_asking()) for _ in range(ASKERS)]
        ends = time.monotonic() + LONGEST_S
        while any(self.found[key] < least for key, least in self.enough.items()) and time.monotonic() < ends:
            version = self.found["swaps"] = self.found["swaps"] + 1
            await self.engine.collective("rl_swap", version, timeout_s=LONGEST_S)
            self.engine.version = version
            self.found["preempted"] = int(self.engine.stats()["preempted"])
            if version % 20 == 0:
                time.sleep(0.1)  # a front process that does not come to read
        self.over = True
        await asyncio.gather(*asking)
        return {**self.found, **await self.count()}

    async def count(self):
        """Whether vLLM's process counts the tokens that arrive, where none is given up."""
        await self.idle()
        counted, arrived = self.engine.tokens, self.found["tokens"]
        await asyncio.gather(*[self.ask(aborts=False) for _ in range(ASKERS)])
        await self.idle()
        return {"counted": self.engine.tokens - counted, "arrived": self.found["tokens"] - arrived}

    async def idle(self):
        while (stats := self.engine.stats())["running"] or stats["waiting"]:
            await asyncio.sleep(0.01)


async def main(folder, scene, tensor_parallel, enough):
    write_model(folder)
    engine = await Engine.launch(arguments(folder, scene, tensor_parallel))
    try:
        if scene == "late":
            await engine.collective("rl_spoil", timeout_s=60)
        asynchronous = engine._llm.vllm_config.scheduler_config.async_scheduling
        return {"asynchronous": asynchronous, "room": engine.sequences_by_kv(40), **await Scene(engine, enough).play()}
    finally:
        await engine.close()


if {"asynchronous", "late"} & {*sys.argv}:  # in the processes that vLLM spawns too
    schedule_asynchronously()
if __name__ == "__main__":
    inner_words("FOLDER", "SCENE", "TENSOR_PARALLEL", "ENOUGH")
    print(
        json.dumps(asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])))),
        flush=True,
    )
