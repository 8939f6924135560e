"""Routes from the real vLLM: the experts that it chose for each token, against transformers and in the learner.

On a CPU vLLM 0.26 returns routes once `tests/harness/told_routes.py` hands its choice on; vLLM from 0.27 on returns
them on GPUs only, and says so.
"""

import asyncio
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.load import ConfigError
from configs.schema import Config
from rollout.engine.arguments import engine_arguments, environment, on_cpu, vllm_fields
from rollout.episodes.recorded_routes import RecordedRoutes
from rollout.rewards.convention import Score
from rollout.tasks import Trajectory
from tests.harness.engines import played
from tests.harness.tiny_experts import tiny_experts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPTS = [[3 + (i + 5 * n) % 60 for n in range(40)] for i in range(6)]
GIVEN = [7, 9, 11]
TELLING = {"worker_extension_cls": "tests.harness.told_routes.TellingWorker"}
SHAPE = {"eos_token_id": None, "num_hidden_layers": 3, "mlp_only_layers": [1], "max_position_embeddings": 512}


def returns_routes() -> bool:
    """Whether the installed vLLM has them on a CPU, though as zeros."""
    return "aux_output_config" not in set(vllm_fields())


only_told = pytest.mark.skipif(
    not returns_routes(), reason="needs a GPU: vLLM returns routes on GPUs only from 0.27 on"
)


def make_config(folder, device="cpu", **changes: Any) -> Config:
    values = {
        "model": {"path": str(folder), "dtype": changes.pop("dtype", "float32")},
        "data": {"train": "train.parquet", "max_prompt_tokens": 200},
        "reward": {"function": "countdown"},
        "sampling": {"max_tokens": 200},
        "rollout": {"device": device, "routing_replay": True, "engine": {"kv_cache_memory_bytes": 4 << 20, **changes}},
    }
    return Config.model_validate(values)


async def launch(config: Config, told: bool = True) -> Any:
    """An engine whose routes are recorded on a CPU; `Engine.start` would refuse that."""
    from rollout.engine.vllm_engine import Engine

    cpu = config.rollout.device == "cpu"
    if cpu:
        os.environ["VLLM_CPU_CI_ENV"] = "1"
    for key, value in environment(cpu).items():
        os.environ.setdefault(key, value)
    return await Engine.launch(engine_arguments(config, 1, cpu) | (TELLING if told and cpu else {}))


@torch.no_grad()
def chosen(model, tokens) -> tuple[np.ndarray, np.ndarray]:
    """By transformers: ids [tokens, layers with experts, k], sorted, and log-probabilities of `tokens[1:]`."""
    found: list[torch.Tensor] = []
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[2])) for router in routers]
    logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    for hook in hooks:
        hook.remove()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return torch.stack(found, 1).sort(-1).values.numpy(), logprobs.numpy()


def alike(routes: np.ndarray, ids: np.ndarray) -> float:
    """Share of tokens and layers with the same experts."""
    return float((np.sort(routes, -1) == ids).all(-1).mean())


async def play(folder, device="cpu", dtype="float32", far=1e-2, length=200, **more: Any) -> SimpleNamespace:
    """Turns, another policy in flight, preemptions; returns what transformers says of each. `far`: nats by which a
    token's log-probability shows another policy; `length`: of the sequence that is swapped under."""
    tiny_experts(folder, **SHAPE, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    two = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(1)
    for parameter in two.parameters():
        parameter.data.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=draw))
    two.save_pretrained(folder / "two")
    seen = SimpleNamespace()
    config = make_config(
        folder, device, dtype=dtype, max_num_seqs=32, block_size=32, num_gpu_blocks_override=40, **more
    )
    engine = await launch(config)
    try:
        await engine.load_folder(folder)
        seen.turns = [await episode(engine, model, prompt) for prompt in PROMPTS[:3]]
        before = engine.stats()["preempted"]
        many = await asyncio.gather(*(engine.generate(prompt, 150, 1.0) for prompt in PROMPTS * 2))
        seen.preempted = engine.stats()["preempted"] - before
        seen.many = [
            alike(made.routes, chosen(model, prompt + made.tokens)[0][:-1])
            for prompt, made in zip(PROMPTS * 2, many, strict=True)
        ]
        started = engine.tokens
        running = asyncio.create_task(engine.generate(PROMPTS[0], length, 1.0))
        while engine.tokens < started + 40:
            await asyncio.sleep(0.001)
        await engine.load_folder(folder / "two")
        seen.swapped = in_flight(model, PROMPTS[0], await running, far)
    finally:
        await engine.close()
    return seen


async def episode(engine, model, prompt) -> SimpleNamespace:
    """Two turns and what is given between and after them, as a sample."""
    routes, trajectory, asked = RecordedRoutes(), Trajectory(prompt), []
    for _ in range(2):
        at = routes.continued(trajectory.tokens)
        asked.append(at.routed)
        made = await engine.generate(trajectory.tokens, 30, 1.0, routed=at.routed)
        routes.add(at, made)
        trajectory.take(replace(made, routes=None))
        trajectory.give(GIVEN)
    trajectory.routes = routes.of(trajectory)
    sample = trajectory.sample(Score(1.0), "")
    rows = sample.routes.numpy()
    read = len(trajectory.tokens) - len(GIVEN) - 1
    ids = chosen(model, trajectory.tokens)[0]
    return SimpleNamespace(
        shape=rows.shape, dtype=rows.dtype, asked=asked, alike=alike(rows[:read], ids[:read]), rest=rows[read:]
    )


def in_flight(model, prompt, made, far) -> SimpleNamespace:
    """Rows of a sequence before and behind the first token that another policy sampled in it."""
    ids, logprobs = chosen(model, prompt + made.tokens)
    off = np.abs(logprobs[len(prompt) - 1 :] - np.array(made.logprobs))
    switch = int((off > far).argmax())
    first = len(prompt) + switch - 1  # the row that this token was sampled from
    before, behind = slice(0, first), slice(first, len(made.routes))
    return SimpleNamespace(
        switch=switch,
        before=alike(made.routes[before], ids[before]),
        behind=alike(made.routes[behind], ids[:-1][behind]),
    )


async def refusal_of(config: Config) -> str:
    """Why no engine starts; the exception, which holds what had been started, ends here."""
    try:
        await launch(config, told=False)
    except ValueError as error:
        return str(error)
    return "it starts"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return played(play(tmp_path_factory.mktemp("routes")))


def test_a_run_file_on_a_cpu_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout.routing_replay: true needs a GPU"):
        on_cpu(make_config(tiny_experts(tmp_path)))


@pytest.mark.long
def test_a_vllm_that_returns_no_routes_is_refused_before_anything_is_generated(tmp_path):
    """0.26 silently returns zeros, later ones say that they cannot."""
    words = "rollout.routing_replay: vLLM returned zeros as the routes of token 0 of 4"
    said = played(refusal_of(make_config(tiny_experts(tmp_path, **SHAPE))))
    assert (words if returns_routes() else "requires Model Runner V2") in said


@pytest.mark.long
@only_told
def test_turns_have_the_routes_of_the_model_in_its_layers_with_experts(seen):
    for turn in seen.turns:
        assert turn.shape == (40 + 2 * 33, 2, 2) and turn.dtype == np.uint8
        assert turn.asked == [0, 40 + 30 - 1]
        assert turn.alike > 0.99 and not turn.rest.any()


@pytest.mark.long
@only_told
def test_preempted_sequences_keep_their_routes(seen):
    assert seen.preempted > 0 and min(seen.many) > 0.99


@pytest.mark.long
@only_told
def test_each_token_of_a_sequence_in_flight_has_the_routes_of_the_policy_that_read_it(seen):
    assert seen.swapped.switch > 0
    assert seen.swapped.before > 0.99 and seen.swapped.behind < 0.9


@pytest.mark.long
@only_told
def test_the_learner_differs_less_from_a_server_whose_routes_it_replays(tmp_path):
    """In bfloat16, where the two choose other experts here and there."""
    from configs.schema import LearnerConfig, ModelConfig
    from learner.model.policy import Policy
    from learner.train.batch import alone as by_itself
    from learner.train.batch import documents_of, pack
    from tests.harness.world import alone

    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    folder = tiny_experts(
        tmp_path, dtype="bfloat16", **SHAPE | shape | {"mlp_only_layers": [], "moe_intermediate_size": 64}
    )

    async def samples() -> list[Any]:
        engine = await launch(make_config(folder, dtype="bfloat16", max_num_seqs=32))
        try:
            await engine.load_folder(folder)
            made = await asyncio.gather(*(engine.generate(prompt, 150, 1.0) for prompt in PROMPTS))
        finally:
            await engine.close()
        found = []
        for prompt, completion in zip(PROMPTS, made, strict=True):
            trajectory, routes = Trajectory(prompt), RecordedRoutes()
            routes.add(routes.continued(prompt), completion)
            trajectory.take(completion)
            trajectory.routes = routes.of(trajectory)
            found.append(trajectory.sample(Score(1.0), ""))
        return found

    made = played(samples())
    off: dict[str, list[float]] = {"live": [], "replayed": []}
    with alone() as mesh:
        model, learner = ModelConfig(path=str(folder), dtype="bfloat16"), LearnerConfig(device="cpu")
        policy = Policy(model, learner, mesh, replay=True)
        for sample in made:
            documents, _ = documents_of([sample], [0], routes=[sample.routes.numpy()])
            row = pack(by_itself(documents))
            for name, one in (("live", replace(row, routes=None)), ("replayed", row)):
                difference = (policy.score(policy.place(one)) - row.behaviour)[row.scored].abs()
                off[name].append(float(difference.mean()))
    assert np.mean(off["replayed"]) < 0.9 * np.mean(off["live"]), off
