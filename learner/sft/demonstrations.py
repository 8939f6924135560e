"""The demonstrations of a run in tokens, all on every rank, and their order. Each rank converts its share before
training, so a row that cannot be trained ends the run at its start."""

import hashlib
import logging
from calendar import timegm
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import repeat
from pathlib import Path
from time import localtime
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from buffer.data.image_rows import IMAGES, MARK
from buffer.data.images import counted
from buffer.data.parts import JoinedRows, SourcePart, open_source
from buffer.ledger import schedule
from configs.data.sources import Source, SourceError, parts_of, source_name
from configs.load import ConfigError
from configs.schema import Config
from configs.sft import longest
from learner.mesh import on_every_rank
from learner.saved.manifest import began_at
from learner.sft.answers import AnswerReader, TrainedText
from learner.sft.row_images import DemonstratedImages, ReadImage
from learner.train import collectives
from learner.train.pictures import THREADS, num_patches
from rollout.errors import PromptError

log = logging.getLogger(__name__)
MOST_SHOWN = 10
READ_AT_ONCE = 1024
Texts = list[TrainedText]


class SourceRows(NamedTuple):
    """Rows of one source among all."""

    start: int
    stop: int
    weight: float | None


class Demonstrations:
    """The rows of a source. `images`: None if no row has some. `began`: as in `DataPosition`."""

    def __init__(
        self,
        rows: Sequence[Texts],
        ranges: Sequence[SourceRows],
        seed: int = 0,
        shuffle: bool = False,
        images: DemonstratedImages | None = None,
        began: int | None = None,
    ) -> None:
        self.began = began
        kept = [number for number, texts in enumerate(rows) if texts]
        self.rows = [rows[number] for number in kept]
        self.dropped = len(rows) - len(kept)
        places = np.searchsorted(kept, [(each.start, each.stop) for each in ranges]).reshape(-1, 2)
        self._shares = [(int(b - a), each.weight) for (a, b), each in zip(places, ranges, strict=True) if each.weight]
        self._seed, self._shuffle, self.images = seed, shuffle, images
        self.order: Callable[[int], Sequence[int]] = lru_cache(2)(self._order)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        return max(len(text.tokens) for texts in self.rows for text in texts)

    @property
    def patches(self) -> int:
        """The most patches of one text's images."""
        return max(num_patches(text.images) for texts in self.rows for text in texts)

    @property
    def digest(self) -> str:
        """16 hex digits over what is trained, before shuffling."""
        found = hashlib.sha256()
        for texts in self.rows:
            for text in texts:
                found.update(len(text.tokens).to_bytes(8, "little") + text.tokens.tobytes() + text.trained.tobytes())
                found.update("".join(image.picture.digest for image in text.images).encode())
            found.update(b"|")
        return found.hexdigest()[:16]

    def _order(self, epoch: int) -> Sequence[int]:
        if self._shares:
            return schedule.mixed([(n, weight or 0.0) for n, weight in self._shares], self._seed, epoch, self._shuffle)
        return schedule.order(len(self.rows), self._seed, epoch, self._shuffle)

    def drawn(self, position: int, number: int) -> Texts:
        """The texts of `number` rows from `position` on, over all epochs."""
        found: Texts = []
        for place in range(position, position + number):
            epoch, index = divmod(place, len(self.rows))
            found += self.rows[self.order(epoch)[index]]
        return found


def read_demonstrations(config: Config, key: str, source: Source, reader: AnswerReader) -> Demonstrations:
    """The rows of `source`. Raises ConfigError, on every rank, if one cannot be trained. A collective."""
    opened, rows, images = on_every_rank(partial(_open, config, key, source))
    limit = config.data.eval[_name(key)].limit if _name(key) in config.data.eval else None
    number = min(rows.starts[-1], limit or rows.starts[-1])
    if images:
        log.info("%s: decoding the images of %d rows, each rank those of its share", key, number)
    mine = range(dist.get_rank(), number, dist.get_world_size())
    reader.marked.clear()
    own, wrong = _converted(config, rows, images, mine, reader)
    _require(wrong)
    _warn_of_marks([rows.place(number) for number in sorted(reader.marked)])
    ranges, start = list[SourceRows](), 0
    for weight, found in opened:
        stop = start + sum(part.rows.number for part in found)
        ranges.append(SourceRows(start, min(stop, number), weight))
        start = stop
    shuffle = config.data.shuffle and not key.startswith("data.eval")
    texts, seed = _exchanged(own, number, images is not None), config.run.seed
    made = Demonstrations(texts, ranges, seed, shuffle, images, reader.began)
    both = zip(parts_of(source), ranges, strict=True)
    empty = [part.path for part, each in both if each.weight and not any(texts[each.start : each.stop])]
    if empty or not len(made):
        why = "every row is too long; name shorter ones, or allow more tokens"
        raise ConfigError([f"{key}: {name}: {why}" for name in (empty if len(made) else [source_name(source)])])
    log.info("%s: %d rows%s", key, len(made), f", {made.dropped} dropped: too long" if made.dropped else "")
    return made


def began_in(checkpoints: Path) -> int:
    """When the run began, of its checkpoints or now: else a run would have other texts on another day. A collective."""
    known = began_at(checkpoints)
    return collectives.broadcast_from_rank0(timegm(localtime()) if known is None else known)


def _open(
    config: Config, key: str, source: Source
) -> tuple[list[tuple[float | None, list[SourcePart]]], JoinedRows, DemonstratedImages | None]:
    """The files of each part of `source` with its weight, their rows, and the rows' images. Raises ConfigError."""
    try:
        opened = [
            (part.weight, open_source(part, config.data, key, False, None, demonstrations=True))
            for part in parts_of(source)
        ]
    except SourceError as error:
        raise ConfigError([f"{key}: {source_name(source)}: {error}"]) from None
    rows = JoinedRows([part for _, found in opened for part in found])
    return opened, rows, DemonstratedImages.of(config, f"{key} {source_name(source)}", rows)


def _warn_of_marks(places: Sequence[str]) -> None:
    if places:
        line = "%s: the row has %s and no images%s; the model reads %s as text: name images in the column %s"
        more = f", as {counted(len(places) - 1, 'more row')} of this rank's share" * (len(places) > 1)
        log.warning(line, places[0], MARK, more, MARK, IMAGES)


def _name(key: str) -> str:
    return key.removeprefix("data.").removeprefix("eval.")


def _converted(
    config: Config, rows: JoinedRows, images: DemonstratedImages | None, numbers: range, reader: AnswerReader
) -> tuple[list[Texts], list[tuple[int, str]]]:
    most, found, wrong = longest(config), list[Texts](), list[tuple[int, str]]()
    said, section = "auto, " * (config.sft.max_tokens == "auto"), reader.section
    limit = f"sft.max_tokens ({said}{most})" if section == "sft" else f"the longest sample of the run ({most})"
    for number, (texts, problem) in zip(numbers, _read(rows, images, numbers, reader), strict=True):
        size = max((len(text.tokens) for text in texts), default=0)
        if size > most and config.sft.too_long == "refuse":
            smaller = ", lower data.max_pixels" * any(text.images for text in texts)
            problem = f"it has {size} tokens, more than {limit}; shorten it{smaller}, or set {section}.too_long: drop"
        wrong += [(number, f"{rows.place(number)}: {problem}")] if problem else []
        found.append(texts if size <= most else [])
    return found, wrong


def _read(
    rows: JoinedRows, images: DemonstratedImages | None, numbers: range, reader: AnswerReader
) -> Iterator[tuple[Texts, str]]:
    """The texts of each row, and why it cannot be trained. Images are decoded in threads."""

    def read(number: int) -> tuple[Texts, str]:
        row = rows.row(number) | (images.of_row(number) if images else {})
        try:
            return reader.texts(row, number), ""
        except PromptError as error:
            return [], str(error)

    alone = len(numbers) if images is None else 1  # a tokenizer may change its settings at its first text
    yield from map(read, numbers[:alone])
    with ThreadPoolExecutor(THREADS) as threads:
        for start in range(alone, len(numbers), READ_AT_ONCE):
            yield from threads.map(read, numbers[start : start + READ_AT_ONCE])


def _require(wrong: list[tuple[int, str]]) -> None:
    gathered: list[list[tuple[int, str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, wrong)
    problems = [line for _, line in sorted(one for each in gathered for one in each)]
    if (more := len(problems) - MOST_SHOWN) > 0:
        problems[MOST_SHOWN:] = [f"and {more} more rows that cannot be trained"]
    if problems:
        raise ConfigError(problems)


def _exchanged(own: Sequence[Texts], number: int, images: bool) -> list[Texts]:
    world, texts = dist.get_world_size(), [text for each in own for text in each]
    if world == 1:
        return list(own)
    counts = collectives.all_gather_ragged(torch.tensor([len(each) for each in own], dtype=torch.int64))
    lengths = collectives.all_gather_ragged(torch.tensor([len(text.tokens) for text in texts], dtype=torch.int64))
    empty = TrainedText(np.zeros(0, np.int32), np.zeros(0, np.bool_))
    columns = [np.concatenate([text[column] for text in [empty, *texts]]) for column in range(2)]
    tokens = collectives.all_gather_ragged(torch.from_numpy(columns[0]))
    trained = collectives.all_gather_ragged(torch.from_numpy(columns[1].astype(np.uint8)))
    shown: list[Iterable[Sequence[ReadImage]]] = [repeat(())] * world
    if images:
        dist.all_gather_object(shown, [text.images for text in texts])
    found: list[Texts] = [[] for _ in range(number)]
    for rank in range(world):
        ends = np.cumsum(lengths[rank].numpy())[:-1]
        flags = np.split(trained[rank].numpy() != 0, ends)
        pieces = zip(np.split(tokens[rank].numpy(), ends), flags, shown[rank], strict=False)
        for place, count in enumerate(counts[rank].tolist()):
            found[place * world + rank] = [TrainedText(*next(pieces)) for _ in range(count)]
    return found
