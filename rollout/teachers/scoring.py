"""The run's teachers, each for the rows of its `data_source`."""

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from buffer.keys import load_token
from buffer.wire.values import LARGEST
from configs.schema import TeacherConfig
from configs.teachers import key_of
from rollout.episodes.stages import Stay
from rollout.errors import RewardError, TeacherError
from rollout.rewards.models.http_model import ServersAway
from rollout.rewards.models.own_servers import OwnServers
from rollout.tasks.trajectory import Taught, Trajectory
from rollout.teachers.teacher_client import Opinion, OwnTeacher, TeacherClient

MOST_LOSSES = 3
"""A request may be what ends the run's servers."""


class Teachers:
    """All teachers of the run. `vocabulary`: tokens of the policy. Raises ValueError, and KeysError when entered."""

    def __init__(self, config: TeacherConfig, keys: Path, vocabulary: int = LARGEST) -> None:
        self._by_source = {source: Teacher(config, source, vocabulary) for source in config.teachers}
        self._keys = keys
        self._waiting: set[Stay] = set()
        self._tokens, self._since = 0, time.monotonic()

    async def __aenter__(self) -> "Teachers":
        for teacher in self._by_source.values():
            teacher.open(self._keys)
        return self

    async def __aexit__(self, *error: object) -> None:
        for teacher in self._by_source.values():
            await teacher.close()

    async def score(self, row: dict[str, Any], made: Sequence[Trajectory]) -> None:
        """Set `taught` if the row has a teacher. Raises TeacherError."""
        source = str(row.get("data_source", ""))
        teacher = self._by_source.get(source) or self._by_source.get("")
        if teacher is None:
            return
        with Stay(self._waiting, len(made)):
            found = await teacher.score([segments(trajectory) for trajectory in made])
        for trajectory, opinion in zip(made, found, strict=True):
            sampled = columns_of(trajectory)["sampled"].astype(bool)
            own = np.where(sampled, opinion.logprobs, np.float32(0))
            trajectory.taught = Taught(teacher.source, own, opinion.ids, opinion.top)
        self._tokens += sum(len(opinion.logprobs) for opinion in found)

    def stats(self) -> dict[str, float]:
        """Since the last call: waiting samples, longest wait in seconds, tokens per second."""
        now = time.monotonic()
        found = {"teacher": float(sum(each.samples for each in self._waiting))}
        found["teacher_tokens_per_s"] = self._tokens / max(now - self._since, 1e-3)
        if self._waiting:
            found["teacher_s"] = now - min(each.since for each in self._waiting)
        self._tokens, self._since = 0, now
        return found


class Teacher:
    """One teacher and its servers."""

    def __init__(self, config: TeacherConfig, source: str, vocabulary: int) -> None:
        self.source, given, urls = source, config.teachers[source], config.urls_of(source)
        key = key_of(config, source)
        asked: dict[str, Any] = {"url": urls, "model": given.model, "api_key_env": given.api_key_env}
        try:
            asked |= {"timeout_s": config.timeout_s, "retries": config.retries, "top_k": config.top_k, "name": key}
            kind: type[OwnTeacher | TeacherClient] = OwnTeacher if given.servers else TeacherClient
            asked |= {"vocabulary": vocabulary} if given.servers else {}
            self._client = kind.model_validate(asked)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"{key}.{first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}") from None
        self._servers = OwnServers(urls, "teacher") if given.servers else None

    def open(self, keys: Path) -> None:
        """Raises KeysError."""
        if self._servers:
            self._client.wait_elsewhere()
            self._client.show(load_token(keys))

    async def close(self) -> None:
        if self._servers:
            self._servers.close()
        await self._client.close()

    async def score(self, samples: Sequence[Sequence["Text"]]) -> list[Opinion]:
        """A sample is a list of its segments. Raises TeacherError."""
        texts = [segment for sample in samples for segment in sample]
        found = iter(await self._asked(texts))
        return [joined([next(found) for _ in sample]) for sample in samples]

    async def _asked(self, texts: Sequence["Text"]) -> list[Opinion]:
        losses = 0
        while True:
            if self._servers:
                await self._servers.ready()
            try:
                return await self._client.opinions([text.tokens for text in texts], [text.sampled for text in texts])
            except TeacherError:
                raise
            except RewardError as error:
                losses += 1
                if self._servers is None or not isinstance(error, ServersAway) or losses >= MOST_LOSSES:
                    raise TeacherError(str(error), temporary=error.temporary, origin=error.origin) from None
                self._servers.lost()


class Text(NamedTuple):
    """A context by itself."""

    tokens: list[int]
    sampled: np.ndarray
    """[tokens] bool"""


def segments(trajectory: Trajectory) -> list[Text]:
    columns = columns_of(trajectory)
    tokens, sampled = columns["tokens"].tolist(), columns["sampled"].astype(bool)
    bounds = pairwise([*trajectory.starts, len(tokens)])
    return [Text(tokens[start:end], sampled[start:end]) for start, end in bounds]


def joined(opinions: Sequence[Opinion]) -> Opinion:
    ids = [each.ids for each in opinions if each.ids is not None]
    top = [each.top for each in opinions if each.top is not None]
    tops = (np.concatenate(ids), np.concatenate(top)) if ids and top else ()
    return Opinion(np.concatenate([each.logprobs for each in opinions]), *tops)


def columns_of(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """A task may have left other kinds of sequences."""
    return trajectory.columns or trajectory.arrays()
