"""A learner's ranks under FSDP, one of `tests.harness.world.together`'s cases: each publishes its own rows to a server
in rank 0's process, and what the server's workers have is compared with what the ranks gather."""

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.schema import ModelConfig
from learner.__main__ import sending_ranks
from learner.mesh import make_mesh, replica
from learner.model.lora.adapter import factors
from learner.weights.sender.publish import Bystander, Sender
from learner.weights.sender.row_rank import RowRank
from tests.harness import world
from tests.harness.keys import server_keys
from tests.harness.weights_server import HEARTBEAT_S, WAIT_S, Addresses, StagingEngine, config, servers


class Received:
    """Two servers in a thread: one stages, one receives bucket by bucket. `until` waits for a version."""

    def __init__(self, address: str, workers: int) -> None:
        self.engines = [StagingEngine(workers), StagingEngine(workers)]
        self._address, self._ready, self._done = address, threading.Event(), Future[None]()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
            self._done.set_result(None)
        except BaseException as error:
            self._done.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        staged, streaming = self.engines
        async with (
            servers(Addresses(self._address), "staged", engine=staged),
            servers(Addresses(self._address), "streamed", engine=streaming, staging="bucket"),
        ):
            self._ready.set()
            await self._end.wait()

    def end(self) -> None:
        self._ready.wait(WAIT_S)
        self._loop.call_soon_threadsafe(self._end.set)
        self._done.result(WAIT_S)


def rows(folder: Path, model: dict[str, Any], on: int, workers: int) -> None:
    """Two versions, on `on` ranks for each copy of the model."""
    mesh = make_mesh("cpu", on)
    policy = world.policy_of(ModelConfig.model_validate(model), mesh)
    wire: Any = Bystander()
    received: Received | None = None
    if replica(mesh) == 0:
        specs, frozen, ranks = policy.weight_specs(), policy.frozen_names(), sending_ranks(policy, mesh)
        given = specs, config(probe_every=0, timeout_s=60.0), 0, policy.device
        if mesh.get_rank() == 0:
            keys = server_keys("learner")
            wire = Sender(*given, heartbeat_s=HEARTBEAT_S, frozen=frozen, ranks=ranks, keys=keys)
            received = Received(wire.address, workers)
        else:
            wire = RowRank(*given, ranks, frozen=frozen)
    sizes: list[Any] = [None] * dist.get_world_size()
    for version in (0, 1):
        stir(policy, version)
        wire.publish(policy, version)
        whole = {name: tensor.clone() for name, tensor in policy.full_weights()} if replica(mesh) == 0 else {}
        if received is not None:
            wait_for(wire, version)
            for engine in received.engines:
                for got in engine.weights:
                    assert list(got) == list(whole) and all(torch.equal(got[name], whole[name]) for name in whole)
        dist.barrier()
    if received is not None:
        received.end()
        assert wire.stats()["weights/failed"] == 0
    copies = getattr(wire, "copies", None) or getattr(wire, "_copies", None)
    held = sum(copy.weights.num_bytes for copy in copies._copies) if copies else 0
    dist.all_gather_object(sizes, held)
    wire.close()
    if mesh.get_rank() == 0:
        torch.save(sizes, folder / "held.pt")


def wait_for(wire: Sender, version: int) -> None:
    """Until both servers have loaded `version`."""
    assert asyncio.run_coroutine_threadsafe(_until(wire, version), wire._loop).result(WAIT_S)


async def _until(wire: Sender, version: int) -> bool:
    members = wire._distributor.members

    def loaded() -> bool:
        held = [member.holds[1] for member in members]
        return held == [version] * 2 and not wire._distributor._busy

    await members.until(loaded, WAIT_S)
    return loaded()


@torch.no_grad()
def stir(policy: Any, version: int) -> None:
    """Other weights, the same on every replica, as after a step; an adapter's B too, which is zero at first."""
    trained = [factor.parameter for factor in factors(policy.model)] or list(policy.model.parameters())
    for number, parameter in enumerate(trained):
        parameter.to_local().add_(0.01 * (1 + version) * (1 + number % 7))
