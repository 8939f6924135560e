"""Judges a run file on this machine: by `configs.checks`, and by rules that need data, disk, sockets, vLLM or a trial.

`python -m configs` runs it as a process with the config on stdin, because `configs` may import no other package.
"""

import os
import random
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from actors.doctor.fp8_gpus import compute_capabilities, without_fp8
from actors.doctor.host import find_gpus, judge_visible_gpus
from actors.doctor.image_sizes import judge_images
from actors.doctor.trial import ROWS_S, Judgement, Rows, try_out
from buffer.curve import LOCAL, LOCK, is_loopback, split
from buffer.data.image_rows import IMAGES, ImageFiles
from buffer.data.images import ImageError
from buffer.resources import REMEDY
from buffer.store.lock import holder, lock_of
from configs import variables
from configs.checks import check, cluster_of, existing, named_by, refuse_paths, refuse_sft
from configs.data.sources import Source, SourceError, needs_truth, parts_of, problems_with, shared_entries, source_name
from configs.entrypoint import BAD_INPUT, DONE
from configs.explain import disk_bytes
from configs.flow.capacity import open_files
from configs.flow.kv_room import gpu_bytes
from configs.hub_reach import skip_hub_out_of_reach
from configs.inner_command import inner_words
from configs.libraries import unusable
from configs.load import ConfigError, parse
from configs.model_facts import SPARE_BYTES, model_facts
from configs.origins import credentials
from configs.plain_text import print_visible, visible_line
from configs.publishing import unpublishable
from configs.schema import NO_REWARD, BufferConfig, Config, RewardConfig, TeacherConfig, WeightsConfig
from rollout.engine.arguments import cliffs, unknown_fields, unknown_parsers, unserved_shapes
from rollout.engine.arguments import problems as engine_problems
from rollout.engine.teacher_server import unknown_arguments
from rollout.engine.vllm_variables import unreadable_variables

LOOPBACK = {
    "buffer.address": BufferConfig().address,
    "weights.host": WeightsConfig().host,
    "reward.host": RewardConfig.model_fields["host"].default,
    "teacher.host": TeacherConfig().host,
}
"""A launch on a cluster replaces these by this machine's address."""
GPU_KEYS = "learner.ranks, rollout.servers, rollout.tensor_parallel, reward.servers or teacher.servers"
ROWS = 1000
IMAGE_BYTES = 32 * 2**20
"""Images are copied to each trial's process."""


def main() -> int:
    """Facts and warnings go to stdout, refusals to stderr."""
    variables.prepare()
    config = parse(sys.stdin.buffer.read().decode())
    skip_hub_out_of_reach(config)
    judgement = judge(config)
    for lines, stream in ((judgement.lines(), sys.stdout), (judgement.refused, sys.stderr)):
        print_visible("\n".join(map(visible_line, lines)), stream, end="\n" * bool(lines))
    return BAD_INPUT if judgement.refused else DONE


def check_here(config: Config) -> Judgement:
    """Judge a run that is to start. Raises ConfigError."""
    judgement = judge(config, live=False)  # the launcher has locked the run
    if judgement.refused:
        raise ConfigError(judgement.refused)
    return judgement


def is_live(config: Config) -> bool:
    """Whether another process has the run, and so its port."""
    run, ledger = config.run.path, config.buffer.path
    return any(map(holder, (run / "launch.lock", *([lock_of(run / ledger)] if ledger else []))))


def judge(config: Config, live: bool | None = None) -> Judgement:
    """Judge `config` on this machine. `live` None: ask `is_live`."""
    try:
        refuse_sft(config)
        refuse_paths(config)
    except ConfigError as error:
        return Judgement(refused=[*error.problems])
    live = is_live(config) if live is None else live
    judgement = Judgement()
    rows, further = _judge_data(config, judgement)
    judgement.facts += [f"note: {line}" for line in cliffs(config)]
    if config.rollout.engine:
        further += engine_problems(config.rollout.engine, config)
    gpus = find_gpus()
    further += unserved_shapes(config, config.rollout.device == "cpu" or (config.rollout.device == "auto" and not gpus))
    further += unpublishable(config, gpu_bytes() if gpus else None)
    if config.learner.matmul == "fp8":
        further += without_fp8(config, gpus, compute_capabilities())
    further += unknown_fields(config.reward.engine, "reward") + unknown_arguments(config)
    further += unknown_parsers(config)
    further += [*unreadable_variables(), *unusable()]
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], open_files(config)
    if 0 <= most < needed:
        further.append(f"ulimit -n: {most} files may be open, but the buffer of this run needs {needed}; {REMEDY}")
    refused, warned = judge_visible_gpus(os.environ)
    further += refused
    judgement.warnings += warned + variables.warnings(os.environ, config.model.path)
    judgement.warnings += list(plain_credentials(config))
    if not live:
        address = config.buffer.address
        further += _socket(config) if address == LOCAL else _port("buffer.address", address)
        for url in config.reward.urls:
            further += _port("reward.port", url.removeprefix("http://"))
        for number in range(len(config.teacher.served)):
            further += _port("teacher.port", f"{config.teacher.host}:{config.teacher.port + number}")
    further += disk_space(config, shutil.disk_usage(existing(config.run.path)).free)
    refused, warned = addresses(config, cluster_of(config))
    judgement.warnings += warned
    try:
        check(config, problems=judgement.rows, further=[*further, *refused])
    except ConfigError as error:
        judgement.refused += error.problems
    _try(config, rows, judgement)
    return judgement


def _judge_data(config: Config, judgement: Judgement) -> tuple[Rows, list[str]]:
    rows: Rows = []
    further: list[str] = []
    for key, source in config.data.sources().items():
        if list(problems_with(source)):  # `check` says so
            continue
        from buffer.problems import load_problems  # imports pyarrow

        try:
            room = existing(config.run.path)
            problems = load_problems(source, config.data, room, f"data.{key}", needs_truth(config))
            judge_images(judgement, config, problems, key)
        except ConfigError as error:
            further += error.problems
            continue
        if key == "train":
            rows, judgement.rows = rows_to_try(problems), len(problems)
            judgement.facts += shares(source, problems.shares)
        elif judgement.rows:
            judgement.warnings += [f"data.{key}: {line}" for line in shared_entries(config.data.train, source)]
    return rows, further + list(demonstration_faults(config))


def demonstration_faults(config: Config) -> Iterator[str]:
    """A line for a row of `data.demonstrations` that the learner would refuse unread."""
    data, key = config.data, "data.demonstrations"
    if data.demonstrations is None or list(problems_with(data.demonstrations.path)):  # `check` says so
        return
    from buffer.data.parts import JoinedRows, open_source  # imports pyarrow
    from buffer.problems import demonstrated_images

    given = data.demonstrations.path
    try:
        opened = (open_source(part, data, key, False, None, demonstrations=True) for part in parts_of(given))
        rows = JoinedRows([part for found in opened for part in found])
        demonstrated_images(config, f"{key} {source_name(given)}", rows)
    except (ConfigError, SourceError) as error:
        yield from error.problems if isinstance(error, ConfigError) else [f"{key}: {error}"]


def plain_credentials(config: Config) -> Iterator[str]:
    """A line for each credential that the run file holds as plain text."""
    for place, _ in credentials(config):
        problem = "the run file holds a credential, and so will the run's config.yaml"
        yield f"{'.'.join(map(str, place))}: {problem}; export it, and write ${{oc.env:NAME}} here"


def rows_to_try(problems: Sequence[dict[str, Any]]) -> Rows:
    """The first, the middle and the last row, then others in random order, within ROWS and IMAGE_BYTES."""
    last = len(problems) - 1
    ends = list(dict.fromkeys([0, last // 2, last]))
    others = set(range(0, last + 1, max(1, -(-len(problems) // ROWS)))).difference(ends)
    numbers = [*ends, *random.Random(0).sample(sorted(others), len(others))]
    rows: list[tuple[int, dict[str, Any]]] = []
    left, end = IMAGE_BYTES, time.monotonic() + ROWS_S
    for number in numbers:
        if rows and time.monotonic() > end:  # some sets make their rows
            break
        row = problems[number]
        if isinstance(files := row.get(IMAGES), ImageFiles):
            left -= files.num_bytes
            if rows and left < 0:
                break
            with suppress(ImageError):  # `judge_images` names it
                rows.append((number, row | {IMAGES: list(files)}))
        else:
            rows.append((number, row))
    return rows


def shares(source: Source, weighted: Sequence[tuple[int, float]]) -> Iterator[str]:
    """What weights mean, a line for each source."""
    rows, weights = sum(rows for rows, _ in weighted), sum(weight for _, weight in weighted)
    for part, (number, weight) in zip(parts_of(source) if weighted else (), weighted, strict=True):
        share = weight / weights
        passes = f"an epoch has {share * rows:,.0f} of them, {share * rows / number:,.3g} passes"
        yield f"data.train: {share:.1%} of the problems are of {part.path}: {number:,} rows; {passes}"


def addresses(config: Config, cluster: str) -> tuple[list[str], list[str]]:
    """Refusals and warnings on loopback addresses. Servers are certain to be elsewhere only if this machine has too few
    GPUs."""
    remedy = "name an address of this machine that the others reach"
    written = [line for key, line in unreachable(config).items() if hosts(config)[key] != LOOPBACK[key]]
    found = written if cluster else []
    missing = gpus_missing(config, len(find_gpus()), "here are") if found else None
    if missing:
        return [f"{line}, but {missing}: servers will be on other machines; {remedy}" for line in found], []
    named = f"{named_by(config)}: {cluster}"
    return [], [f"{line}: if Ray ({named}) places a server on another one, {remedy}" for line in found]


def hosts(config: Config) -> dict[str, str]:
    """By key: where this machine's processes listen for others."""
    found = {"buffer.address": config.buffer.address, "weights.host": config.weights.host}
    found |= {"reward.host": config.reward.host} if config.reward.servers else {}
    return found | ({"teacher.host": config.teacher.host} if config.teacher.served else {})


def unreachable(config: Config) -> dict[str, str]:
    """A line for each of `hosts` that only this machine can reach, by key."""
    found = {key: (value, value if "://" in value else f"tcp://{value}:0") for key, value in hosts(config).items()}
    local = {key: value for key, (value, address) in found.items() if is_loopback(address)}
    return {key: f"{key}: {value} is reached from this machine only" for key, value in local.items()}


def _try(config: Config, rows: Rows, judgement: Judgement) -> None:
    try:
        judgement.add(try_out(parts_to_try(config, judgement.refused), config, rows, judgement.rows))
    except TypeError as error:
        judgement.refused.append(f"data.train: {source_name(config.data.train)}: no message can hold a row: {error}")


def parts_to_try(config: Config, refused: Sequence[str]) -> list[str]:
    """Parts to try, without those that have a line in `refused`."""
    keys = {
        "prompts": ("model.path", "data.chat_template", "data.format_prompt"),
        "reward": ("reward.function", "reward.kwargs", "reward.model"),
        "task": ("rollout.task", "rollout.environment"),
        "teacher": ("model.path", "teacher"),
        "architecture": ("model.path",),
        "algorithm": ("algorithm.",),
    }
    if config.rollout.task in ("single_turn", "agent"):
        del keys["task"]
    if config.reward.function in ("task", NO_REWARD):
        del keys["reward"]
    if not config.teacher.teachers:
        del keys["teacher"]
    if ":" not in config.algorithm.loss + config.algorithm.advantage:
        del keys["algorithm"]
    if model_facts(config.model.path).proven:
        del keys["architecture"]
    return [part for part, names in keys.items() if not any(line.startswith(names) for line in refused)]


def disk_space(config: Config, free: int) -> Iterator[str]:
    """Whether the checkpoints of the whole run fit, those that it has already included."""
    folder = config.run.path / "checkpoints"
    have = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    needed = (disk_bytes(config) or 0) - have + SPARE_BYTES
    if needed > max(free, SPARE_BYTES):
        sizes = f"its checkpoints take {needed / 2**30:,.3g} GiB of disk, {existing(folder)} has {free / 2**30:,.3g}"
        remedy = "free some, lower learner.keep_checkpoints or learner.keep_best, raise learner.keep_every"
        yield f"run.folder: {config.run.folder}: {sizes}; {remedy}, or set run.folder elsewhere"


def gpus_needed(config: Config, available: int) -> dict[str, int]:
    """If none are `available`, the device `auto` means CPU."""
    learner, rollout = config.learner, config.rollout
    needed = {"learner": learner.ranks, "servers": rollout.least_servers * rollout.tensor_parallel}
    needed["reward servers"] = config.reward.servers * config.reward.gpus
    needed["teacher servers"] = config.teacher.all_gpus
    devices = dict.fromkeys(needed, rollout.device) | {"learner": learner.device}
    return {
        name: gpus if devices[name] == "cuda" or (devices[name] == "auto" and available) else 0
        for name, gpus in needed.items()
    }


def gpus_missing(config: Config, available: int, where: str) -> str | None:
    """`where` introduces `available`, as in `Ray sees`."""
    needed = gpus_needed(config, available)
    total = sum(needed.values())
    if total <= available:
        return None
    parts = ", ".join(f"{name} {gpus}" for name, gpus in needed.items() if gpus)
    return f"the run needs {total} GPUs ({parts}), {where} {available}"


def misfits(config: Config, gpus: int) -> Iterator[str]:
    """What keeps a launch from this machine alone, which has so many GPUs."""
    cluster = "name a Ray cluster in cluster.address or RAY_ADDRESS"
    if config.learner.nodes > 1:
        yield f"learner.nodes: {config.learner.nodes} take a machine each; {cluster}, or set learner.nodes 1"
    if missing := gpus_missing(config, gpus, "here are"):
        yield f"{missing}: lower {GPU_KEYS}, set their device to cpu, or {cluster}"


def without_place(config: Config, nodes: Sequence[int]) -> str | None:
    """A server's GPUs are on one node, and so are those of a node's learner ranks. Reward and teacher servers are on
    the first node, this machine."""
    needed, free = gpus_needed(config, sum(nodes)), list(nodes)
    ranks, tensor_parallel = config.learner.nodes, config.rollout.tensor_parallel
    has = f"the nodes have {', '.join(map(str, nodes))} GPUs"
    for kind in ("reward", "teacher"):
        if (here := needed[f"{kind} servers"]) > free[0]:
            return f"{kind}.servers: {here} GPUs of this machine, which has {free[0]}"
        free[0] -= here
    share = needed["learner"] // ranks
    fit = sorted((gpus, node) for node, gpus in enumerate(free) if gpus >= share)
    if len(fit) < ranks:
        spread = f"{ranks} nodes with {share} GPUs each" if share else f"{ranks} nodes"
        return f"learner.nodes: {ranks} with learner.ranks {config.learner.ranks} take {spread}; {has}"
    for _, node in sorted(fit, key=lambda pair: (pair[1] != 0, pair))[:ranks]:  # here first, then the tightest node
        free[node] -= share
    servers = needed["servers"] // tensor_parallel
    if servers > (room := sum(gpus // tensor_parallel for gpus in free)):
        takes = f"{servers} servers take {tensor_parallel} GPUs of one node each"
        return f"rollout.tensor_parallel: {takes}; {has}, which leave room for {room} beside the rest of the run"
    return None


def _socket(config: Config) -> Iterator[str]:
    if pid := holder(config.run.path / "keys" / LOCK):
        yield f"buffer.address: process {pid}, another buffer of run {config.run.path}, listens there; stop it"


def _port(key: str, address: str) -> Iterator[str]:
    host, port = split(address)
    if port == "*":
        yield f"{key}: {address} leaves the port open, but all processes must know it; name one"
        return
    try:
        family, _, _, _, here = socket.getaddrinfo(None if host == "*" else host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
            trial.bind(here)
    except OSError as error:
        yield f"{key}: cannot listen on {address}: {error.strerror}; see `ss -ltnp`, or name another port"


if __name__ == "__main__":
    inner_words()
    sys.exit(main())
