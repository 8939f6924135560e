"""One rank of several, forked for `tests.harness.world.together`."""

import json
import os
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from buffer.wire.client import LearnerClient
from buffer.wire.values import Bounds
from configs.load import ConfigError
from configs.schema import AlgorithmConfig, Config, CriticConfig, LoraConfig, ModelConfig
from learner import watchdog
from learner.checkpoint import Checkpoints
from learner.mesh import make_mesh, replica, shards
from learner.model import context, loading, unshard
from learner.model.experts.mixture import Experts
from learner.model.lora.adapter import Factor
from learner.model.lora.base import Base, digest
from learner.model.microbatch import one_document
from learner.sft.answers import AnswerReader
from learner.sft.beside import Beside
from learner.sft.demonstrations import read_demonstrations
from learner.sound import SoundSteps, only
from learner.starting import decide_budget, decide_gather, decide_speed
from learner.train import collectives
from learner.train.batch import Batch
from learner.train.routes import RouteMismatch
from learner.watchdog import Watchdog
from tests.harness import shared_rows, world
from tests.harness.adapters import stir
from tests.harness.demonstrated import chatml_tokenizer, sft_config
from tests.harness.episodic import make_episodes, make_forks
from tests.harness.expert_batches import SIZES, random_routes, routed
from tests.harness.keys import client_keys
from tests.harness.offloaded import offloaded
from tests.harness.pictured import form_of, make_pictured
from tests.harness.published_rows import rows
from tests.harness.valued import actor_critic, critic_of, gradients_of_both
from tests.harness.valued import run as run_valued


def gradients(
    folder: Path,
    cuts: list[list[int]],
    budgets: list[int],
    algorithms: list[dict[str, Any]],
    device: str = "cpu",
    long: int = 24,
    share: bool = False,
    episodes: bool = False,
    routes: list[int] | None = None,
    gather: str | int = "pass",
    trees: bool = False,
) -> None:
    """Gradients of one batch for several cuts into parts, budgets and algorithms, saved as `FOLDER/gradients.pt`.

    `share`: the batch is one of groups with common prompts, and each prompt is computed once. `episodes`: one of
    samples with several segments. `trees`: one of episodes with forks, whose prefixes are shared too. `routes`: they
    are replayed, of a mixture of these sizes; the tallies are saved too.
    """
    mesh, rank = init_device_mesh(device, (dist.get_world_size(),)), dist.get_rank()
    model, found = ModelConfig(path=str(folder / "model"), dtype="float32"), {}
    learner = world.LEARNER.model_copy(update={"gather": gather})
    entries = world.make_groups() if share else world.make_samples(long=long)
    entries = make_episodes() if episodes else make_forks() if trees else entries
    sizes = Experts(*routes) if routes else None
    entries = routed(entries, partial(random_routes, sizes=sizes)) if sizes else entries
    for number, config in enumerate(map(AlgorithmConfig.model_validate, algorithms)):
        policy = world.policy_of(model, mesh, learner, entropy_gradient=config.entropy_bonus > 0, replay=bool(sizes))
        for parts, budget in product(cuts, budgets):
            algorithm = world.algorithm_of(policy, budget, config)
            part = world.cut(entries, 3, parts, rank)
            key_room = policy.sharing.key_room if trees else None
            batch = Batch.from_part(part, budget, policy.costs.quadratic, share, replayed=sizes, key_room=key_room)
            sums = algorithm.backward(policy, batch)
            found[f"{parts} {budget} {number}"] = world.gradients(policy)
            if sizes:
                found[f"{parts} {budget} {number}"]["tally"] = collectives.all_reduce_sum(sums["moe"])
            algorithm.optimizer.adamw.zero_grad()
    if rank == 0:
        torch.save(found, folder / "gradients.pt")


def beside(folder: Path, cuts: list[list[int]], gathers: list[str]) -> None:
    """Gradients of one batch with demonstrations beside it, for several cuts into parts, saved as
    `FOLDER/gradients.pt`."""
    from tests.learner.sft.test_answer_loss import data_of, made_texts

    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    model, texts, found = ModelConfig(path=str(folder / "model"), dtype="float32"), made_texts(), {}
    for gather in gathers:
        policy = world.policy_of(model, mesh, world.LEARNER.model_copy(update={"gather": gather}))
        algorithm, extra = world.algorithm_of(policy, 40), Beside(data_of(texts), len(texts), 0.25, 40)
        for parts in cuts:
            batch = algorithm.pack(policy, world.cut(world.make_samples(), 3, parts, rank))
            algorithm.backward(policy, batch, extra.draw(policy, batch.version))
            found[f"{gather} {parts}"] = world.gradients(policy)
            algorithm.optimizer.adamw.zero_grad()
    if rank == 0:
        torch.save(found, folder / "gradients.pt")


def share_rows(
    folder: Path, cases: list[dict[str, Any]], size: int, device: str = "cpu", shards: int | None = None
) -> None:
    """What `shared_rows.compute` finds, saved as `FOLDER/shared_rows-RANK.pt`; a rank that takes other samples than its
    neighbour is refused."""
    rank = dist.get_rank()
    torch.save(shared_rows.compute(folder, cases, size, device, shards), folder / f"shared_rows-{rank}.pt")
    try:
        context.check_same(rank, context.join(size, timedelta(seconds=60)))
    except RuntimeError as error:
        (folder / f"refused-{rank}.txt").write_text(str(error))


class NotedSteps:
    """An algorithm that trains nothing and notes the items of each batch."""

    def __init__(self) -> None:
        self.items: list[list[int]] = []

    def step(self, policy: Any, part: Any) -> dict[str, float]:
        self.items.append(part.rows.item.numpy().tolist())
        return {"gradient/skipped": 0.0, "gradient/overflowed": 0.0}


def sound(folder: Path, address: str) -> None:
    """Take three batches from a buffer through `SoundSteps`, saved as `FOLDER/RANK.json`. At first one rank has batch 0
    as it was before it lost a group: none trains it."""
    rank, steps, version = dist.get_rank(), NotedSteps(), 0
    with LearnerClient(
        address, f"learner-{rank}", "f" * 16, rank, dist.get_world_size(), timeout_s=60, keys=client_keys("learner")
    ) as batches:
        batches.rewind(0)
        collectives.meet()
        judge = SoundSteps(steps, batches, Bounds(vocabulary=64))  # type: ignore[arg-type]
        part = batches.take(0)
        assert part is not None
        assert judge.step(None, part if rank else only(part, 0)) is None and not steps.items  # type: ignore[arg-type]
        while version < 3:
            part = batches.take(version)
            assert part is not None
            if judge.step(None, part) is not None:  # type: ignore[arg-type]
                batches.trained(version, 0)
                version += 1
    (folder / f"{rank}.json").write_text(json.dumps(steps.items))


def adapted(folder: Path, lora: dict[str, Any], cuts: list[list[int]], tokens: list[int]) -> None:
    """Saves figures of a model with an adapter as `FOLDER/adapted.pt`: version 0, the base's digest and scores of
    `tokens`, gradients of one batch for several cuts."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    model = ModelConfig(path=str(folder / "model"), dtype="float32", lora=LoraConfig.model_validate(lora))
    policy = world.policy_of(model, mesh)
    found = {"first": {name: x.clone() for name, x in policy.adapter()}, "digest": digest(policy.model, mesh)}
    stir(policy)
    found["base"] = Base(policy).score(policy.place(one_document(tokens)))[1:]
    algorithm, grads = world.algorithm_of(policy, 30), []
    for parts in cuts:
        algorithm.backward(policy, Batch.from_part(world.cut(world.make_samples(), 3, parts, rank), 30))
        grads.append(world.gradients(policy))
        algorithm.optimizer.adamw.zero_grad()
    if rank == 0:
        torch.save(found | {"gradients": grads}, folder / "adapted.pt")


def pictured(folder: Path, model: dict[str, Any], cuts: list[list[int]], budget: int) -> None:
    """Gradients of a batch with images for several cuts into parts, saved as `FOLDER/gradients.pt`."""
    mesh, rank, config = init_device_mesh("cpu", (2,)), dist.get_rank(), ModelConfig.model_validate(model)
    policy, form, found = world.policy_of(config, mesh), form_of(config), []
    algorithm = world.algorithm_of(policy, budget, form=form)
    for parts in cuts:
        part = make_pictured(form).part(3, parts, rank)
        share = policy.sharing.prompts
        batch = Batch.from_part(part, budget, policy.costs.quadratic, share, form, policy.costs.patch_cost)
        algorithm.backward(policy, batch)
        found.append(world.gradients(policy))
        algorithm.optimizer.adamw.zero_grad()
    if rank == 0:
        torch.save(found, folder / "gradients.pt")


def replicas(folder: Path, copies: list[int], cuts: list[int], budget: int, moves: list[list[dict[str, Any]]]) -> None:
    """`replicated`, then `moved` for each of `moves`, in one start of the ranks."""
    replicated(folder, copies, cuts, budget)
    for number, stages in enumerate(moves):
        moved(folder, f"moved{number}", stages)
    refused(folder)


def refused(folder: Path) -> None:
    """What is said of checkpoints on two nodes: of folders that are not one, and where the nodes have changed places;
    saved as `FOLDER/refused-RANK.json`."""
    rank, mesh, said = dist.get_rank(), make_mesh("cpu", 2), []
    for number, options in ((rank // 2, {}), (1 - rank // 2, {"checkpoint_on": "first_node"})):
        try:
            run(folder, mesh, rank, 0, 0, [], folder / f"node{number}", options)
        except ConfigError as error:
            said.append(str(error))
    (folder / f"refused-{rank}.json").write_text(json.dumps(said))


def other_base(folder: Path, lora: dict[str, Any]) -> None:
    """What two nodes of a rank each, of which the first alone has checkpoints, say of one that is refused: saved as
    `FOLDER/refused-RANK.txt`."""
    rank, options = dist.get_rank(), {"checkpoint_on": "first_node"}
    try:
        run(folder, make_mesh("cpu", 1), rank, 2, 2, [], folder / "node1" if rank else None, options, lora)
    except ConfigError as error:
        (folder / f"refused-{rank}.txt").write_text(str(error))


def replicated(folder: Path, copies: list[int], cuts: list[int], budget: int) -> None:
    """For each number of ranks that share a copy, of `copies`, and each `learner.gather`: one batch's gradient, its
    reductions between copies, and the weights after a step, saved as `FOLDER/replicated.pt`."""
    rank, model, found = dist.get_rank(), ModelConfig(path=str(folder / "model"), dtype="float32"), {}
    for number, gather in product(copies, world.GATHERS):
        mesh = make_mesh("cpu", number)
        policy = world.policy_of(model, mesh, world.LEARNER.model_copy(update={"gather": gather}))
        algorithm = world.algorithm_of(policy, budget)
        batch = Batch.from_part(world.cut(world.make_samples(), 3, cuts, rank), budget, policy.costs.quadratic)
        before = reductions(mesh)
        algorithm.backward(policy, batch)
        reduced, grads = reductions(mesh) - before, world.gradients(policy)
        metrics = algorithm.optimizer.update(3)
        found[number, gather] = grads, metrics, world.weights(policy), reduced, len(batch.microbatches), replica(mesh)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [(each[3], each[5]) for each in found.values()])
    if rank == 0:
        torch.save((found, every), folder / "replicated.pt")


def reductions(mesh: Any) -> int:
    """All-reduces between copies that this rank has begun, as the flight recorder has them."""
    name = mesh["replicate"].get_group().group_name if mesh.ndim == 2 else None
    entries = watchdog.flight_record(active=False)["entries"]
    return sum(e["profiling_name"] == "gloo:all_reduce" and e["process_group"][0] == name for e in entries)


def gathers(folder: Path, cases: list[dict[str, Any]], cuts: list[int], budget: int) -> None:
    """For each case and each `learner.gather`: one batch's gradients, and the collectives of its backward pass, saved
    as `FOLDER/gathers.pt`."""
    found = [{gather: gathered(case, gather, cuts, budget) for gather in world.GATHERS} for case in cases]
    if dist.get_rank() == 0:
        torch.save(found, folder / "gathers.pt")


def gathered(case: dict[str, Any], gather: str | int, cuts: list[int], budget: int) -> tuple[dict[str, int], Any]:
    """`case`: model, algorithm and shards. The numbers are of collectives, of groups that FSDP gathers together, and of
    microbatches."""
    model, config = ModelConfig.model_validate(case["model"]), AlgorithmConfig.model_validate(case["algorithm"])
    learner = world.LEARNER.model_copy(update={"gather": gather})
    policy = world.policy_of(model, make_mesh("cpu", case["shards"]), learner)
    if model.lora:
        stir(policy)
    form = form_of(model) if policy.sight else None
    algorithm = world.algorithm_of(policy, budget, config, reference=Base(policy) if model.lora else None, form=form)
    part = (make_pictured(form).part(3, [9, 6], dist.get_rank()) if form
            else world.cut(world.make_samples(), 3, cuts, dist.get_rank()))  # fmt: skip
    batch = Batch.from_part(part, budget, policy.costs.quadratic, False, form, policy.costs.patch_cost)
    before = collectives_begun()
    algorithm.backward(policy, batch)
    numbers = collectives_begun()
    numbers.subtract(before)
    groups = [[*each.parameters()] for each in loading.all_blocks(policy.model)]
    inside = {id(parameter) for group in groups for parameter in group}
    groups.append([parameter for parameter in policy.parameters() if id(parameter) not in inside])
    trained = sum(any(parameter.requires_grad for parameter in group) for group in groups)
    of_ends = any(parameter.requires_grad for parameter in groups[-1])
    sizes = {"groups": len(groups), "trained groups": trained, "trained ends": int(of_ends)}
    sizes["microbatches"] = len(batch.microbatches)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
    return dict(numbers) | sizes, world.gradients(policy)


def collectives_begun() -> Counter[str]:
    """All-gathers and reductions that this rank has begun, as the flight recorder has them; gloo's reduce-scatter is an
    all-reduce."""
    entries = watchdog.flight_record(active=False)["entries"]
    assert len(entries) < 2000, "its buffer holds no more"
    names = [entry["profiling_name"] for entry in entries]
    return Counter({kind: sum(kind in name for name in names) for kind in ("gather", "reduce")})


def wholes(folder: Path, shapes: dict[str, list[int]], on: int, limits: list[int]) -> None:
    """What each rank of the first copy gets of the weights of `shapes`, every second one times 3, sharded over `on`
    ranks, with at most so many bytes together, and how many all-gathers it takes; `wholes.pt`, for each limit."""
    mesh, found = make_mesh("cpu", on), []
    module = world.sharded(world.random_weights(shapes), mesh)
    weights = [Factor(name, p, 1.0 + 2 * (at % 2)) for at, (name, p) in enumerate(module.named_parameters())]
    for unshard.GATHER_BYTES in limits if replica(mesh) == 0 else ():
        before = collectives_begun()["gather"]
        got = {name: x.clone() for name, x in unshard.unshard(weights, torch.device("cpu"), torch.bfloat16)}
        found.append((got, collectives_begun()["gather"] - before))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        torch.save(every, folder / "wholes.pt")


def decisions(folder: Path) -> None:
    """`learner.gather` of each rank for several run files, the second of which is rank 1's alone; `decisions.pt`."""
    rank, mesh, found = dist.get_rank(), make_mesh("cpu", 2), []
    for learner in ({}, {"cpu_offload": rank == 1}, *({"gather": gather} for gather in (*world.GATHERS, 100))):
        model = {"path": str(folder / "model"), "dtype": "float32"}
        given = {"data": {"train": "x"}, "reward": {"function": "x"}, "learner": learner | {"ranks": 2}}
        decided = decide_gather(Config(model=model, **given), torch.device("cpu"), mesh, 0).learner.gather
        every: list[Any] = [None, None]
        dist.all_gather_object(every, decided)
        found.append(every)
    if rank == 0:
        torch.save(found, folder / "decisions.pt")


def speeds(folder: Path, cases: list[tuple[dict[str, Any], list[int]]]) -> None:
    """For each of `cases`, keys of the learner and the memory of each rank's GPU: what each rank decides for speed;
    `speeds.pt`."""
    rank, mesh, found = dist.get_rank(), make_mesh("cpu", 2), []
    for learner, memory in cases:
        given = {"data": {"train": "x"}, "reward": {"function": "x"}, "learner": learner | {"ranks": 2}}
        config = Config(model={"path": str(folder)}, run={"versions": 1000}, **given)
        decided = decide_speed(config, memory[rank], mesh, 0).learner
        every: list[Any] = [None, None]
        dist.all_gather_object(every, (decided.compile, decided.activation_checkpointing, decided.head_chunk_tokens))
        found.append(every)
    if rank == 0:
        torch.save(found, folder / "speeds.pt")


def unread(folder: Path, models: list[str]) -> None:
    """Each rank reads a model of its own of `models`; why it decides nothing for speed goes to `unread-RANK.txt`."""
    rank, mesh = dist.get_rank(), make_mesh("cpu", 2)
    given = {"data": {"train": "x"}, "reward": {"function": "x"}, "learner": {"ranks": 2}}
    try:
        decide_speed(Config(model={"path": str(folder / models[rank])}, **given), None, mesh, 0)
    except ConfigError as refused:
        (folder / f"unread-{rank}.txt").write_text(str(refused))


def budgets(folder: Path, gather: str, memory: list[list[int]]) -> None:
    """For the `memory` of each rank's GPU: the tokens of each rank's microbatches, or why it refuses; `budgets.pt`."""
    rank, mesh, found = dist.get_rank(), make_mesh("cpu", 2), []
    model, learner = {"path": str(folder), "dtype": "float32"}, {"ranks": 2, "gather": gather}
    config = Config(model=model, data={"train": "x"}, reward={"function": "x"}, learner=learner)
    for sizes in memory:
        torch.cuda.mem_get_info = partial(_twice, sizes[rank])
        every: list[Any] = [None, None]
        dist.all_gather_object(every, _budget(config, mesh))
        found.append(every)
    if rank == 0:
        torch.save(found, folder / "budgets.pt")


def _twice(size: int, device: torch.device) -> tuple[int, int]:
    """The GPU is free, and this is its size."""
    return size, size


def _budget(config: Config, mesh: DeviceMesh) -> int | str:
    device = torch.device("cuda")
    try:
        return decide_budget(decide_gather(config, device, mesh, 0), device, mesh, False, 0, 0)[1]
    except ConfigError as refused:
        return str(refused)


def unseen(folder: Path, files: list[str]) -> None:
    """Each rank reads demonstrations of its own of `files`; what it says of them goes to `unseen-RANK.txt`."""
    rank = dist.get_rank()
    config = sft_config(folder / str(rank), data={"train": str(folder / files[rank])})
    reader = AnswerReader(chatml_tokenizer(), config)
    try:
        read_demonstrations(config, "data.train", config.data.train, reader)
    except ConfigError as refused:
        (folder / f"unseen-{rank}.txt").write_text(str(refused))
    finally:
        reader.close()


def moved(folder: Path, name: str, stages: list[dict[str, Any]]) -> None:
    """Train in `stages`, each restoring what the one before has saved; the metrics and the last weights go to
    `FOLDER/NAME.pt`. `node_ranks`: each so many ranks see a folder of their own."""
    rank, records = dist.get_rank(), []
    for stage in stages:
        mesh, local = make_mesh("cpu", stage["shards"]), stage.get("node_ranks")
        seen = folder / f"node{rank // local}" if local else folder
        seen.mkdir(exist_ok=True)
        options = {"checkpoint_on": "first_node" if local else "shared"}
        result = run(folder, mesh, rank, stage["start"], stage["stop"], stage["cuts"], seen, options)
        records += result["records"]
    if rank == 0:
        torch.save({"records": records, "weights": result["weights"]}, folder / f"{name}.pt")


def train(folder: Path, start: int, stop: int, cuts: list[int], name: str, lora: dict[str, Any] | None = None) -> None:
    """Train from the newest checkpoint, of version `start`, to `stop`; metrics and weights go to `FOLDER/NAME.pt`."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    result = run(folder, mesh, rank, start, stop, cuts, lora=lora)
    if rank == 0:
        torch.save(result, folder / f"{name}.pt")


def run(
    folder: Path,
    mesh: Any,
    rank: int,
    start: int,
    stop: int,
    cuts: list[int],
    seen: Path | None = None,
    options: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`seen`: where this rank's node has its checkpoints, if not in `folder`; `options` of the learner."""
    given = LoraConfig.model_validate(lora) if lora else None
    model = ModelConfig(path=str(folder / "model"), dtype="float32", lora=given)
    policy = world.policy_of(model, mesh)
    algorithm = world.algorithm_of(policy, 200)
    learner = world.LEARNER.model_copy(update={"checkpoint_every": 2} | (options or {}))
    where, shared_by = (seen or folder) / "checkpoints", shards(mesh)
    checkpoints = Checkpoints(where, model, learner, algorithm.optimizer, versions=100, shards=shared_by)
    checkpoints.ranks.check_folder()
    assert checkpoints.restore(policy) == start
    records = []
    for version in range(start, stop):
        part = world.cut(world.make_samples(version), version, cuts, rank)
        figures = algorithm.step(policy, part)
        records.append({name: value for name, value in figures.items() if not name.startswith("time/")})
        checkpoints.save(policy, version + 1, figures["reward/mean"])
    checkpoints.close()
    return {"records": records, "weights": world.weights(policy)}


def valued(folder: Path, copies: list[int], cuts: list[int], budget: int) -> None:
    """For each number of ranks that share a copy and each `learner.gather`: gradients of policy and critic for one
    batch of episodes, and the critic's figures, saved as `FOLDER/valued.pt`."""
    rank, model, found = dist.get_rank(), ModelConfig(path=str(folder / "model"), dtype="float32"), {}
    config = AlgorithmConfig(advantage="gae", critic=CriticConfig(gamma=0.9, gae_lambda=0.5))
    for number, gather in product(copies, world.GATHERS):
        mesh, learner = make_mesh("cpu", number), world.LEARNER.model_copy(update={"gather": gather})
        policy, critic = world.policy_of(model, mesh, learner), critic_of(model, mesh, config.critic, learner)
        part = world.cut(make_episodes(), 3, cuts, rank)
        found[number, gather] = gradients_of_both(actor_critic(policy, critic, budget, config), policy, part)
    if rank == 0:
        torch.save(found, folder / "valued.pt")


def valued_runs(folder: Path, name: str, start: int, stop: int, cuts: list[int]) -> None:
    """`tests.harness.valued.run`, saved as `FOLDER/NAME.pt`."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    found = run_valued(folder, mesh, rank, start, stop, cuts)
    if rank == 0:
        torch.save(found, folder / f"{name}.pt")


def unrouted(folder: Path) -> None:
    """A sample of rank 1 has no routes; what each rank says of it is saved as `FOLDER/unrouted-RANK.txt`."""
    entries, rank = routed(world.make_samples()), dist.get_rank()
    entries[20] = world.make_samples()[20]
    try:
        Batch.from_part(world.cut(entries, 3, [12, 12], rank), 64, replayed=SIZES)
    except RouteMismatch as mismatch:
        (folder / f"unrouted-{rank}.txt").write_text(str(mismatch))


def late(folder: Path, timeout_s: float) -> None:
    """Rank 1 sleeps where the others reduce."""
    with Watchdog(timeout_s, folder / "logs"):
        collectives.all_reduce_max(1.0)
        if dist.get_rank() == 1:
            sleep_in_here()
        collectives.all_reduce_max(2.0)


def cut(folder: Path, timeout_s: float, holder: int) -> None:
    """The process that holds the ranks' store stops; then each rank waits for the other in a collective of its own."""
    watchdog.ANSWER_S = 2.0  # of this process alone, which the case has to itself
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    with Watchdog(timeout_s, folder / "logs"):
        for group in groups:
            dist.barrier(group)  # gloo connects at the first collective, by way of the store
        if dist.get_rank() == 0:
            os.kill(holder, signal.SIGSTOP)
        collectives.all_reduce_max(1.0)
        dist.all_reduce(torch.zeros(1), group=groups[dist.get_rank()])
    raise AssertionError("no collective of two ranks ends with one")


def absent(folder: Path, timeout_s: float) -> None:
    """Rank 1 sleeps where rank 0 reduces with it; rank 2 is not of their group, and has begun fewer collectives."""
    group = dist.new_group([0, 1])
    with Watchdog(timeout_s, folder / "logs"):
        if dist.get_rank() < 2:
            dist.barrier(group)  # gloo connects at the first collective
        collectives.all_reduce_max(1.0)
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1), group=group)
        sleep_in_here()


def failing(folder: Path) -> None:
    """Rank 1 fails where the others reduce."""
    collectives.all_reduce_max(1.0)
    if dist.get_rank() == 1:
        raise ValueError("rank 1 of this case fails")
    collectives.all_reduce_max(2.0)


def refusing(folder: Path, lives: bool) -> None:
    """Rank 1 is refused something where rank 0 reduces. `lives`: it ends last, so that no connection breaks."""
    watchdog.OWN_S = 1.0  # of this process alone, which the case has to itself
    try:
        with Watchdog(50.0, folder / "logs"):
            collectives.all_reduce_max(1.0)
            if dist.get_rank() == 1:
                raise ConfigError(["learner.ranks: rank 1 alone finds this; correct it"])
            collectives.all_reduce_max(2.0)
    except ConfigError:
        with suppress(RuntimeError):  # rank 0 has ended
            dist.recv(torch.zeros(1), src=0) if lives else None
        raise


def sleep_in_here() -> None:
    threading.Event().wait(110)


CASES: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        gradients,
        share_rows,
        sound,
        adapted,
        pictured,
        replicas,
        other_base,
        gathers,
        wholes,
        offloaded,
        rows,
        decisions,
        speeds,
        budgets,
        unread,
        unseen,
        train,
        unrouted,
        late,
        cut,
        absent,
        failing,
        refusing,
        beside,
        valued,
        valued_runs,
    )
}


def main(case: str, folder: Path, arguments: dict[str, Any], environment: dict[str, str], errors: Path) -> None:
    """The forked process: one rank, as `environment` names it; what it says goes to the file `errors`."""
    os.environ.update(environment)
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    code = 1
    try:
        torch.set_num_threads(1)
        watchdog.enable_flight_recorder()
        if arguments.get("device") == "cuda":
            torch.cuda.set_device(int(os.environ["RANK"]))
        backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backends, timeout=timedelta(seconds=60))
        CASES[case](folder, **arguments)
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # as a learner ends: torch's threads sometimes abort while the interpreter shuts down
