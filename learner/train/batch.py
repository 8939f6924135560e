"""Makes microbatches of a rank's part of a batch (docs/design/learner.md): `open_part` decodes, `agree` compares the
ranks, `pack_all` lays rows out. `agree` is a collective: all ranks take the same number of microbatches, so that FSDP's
collectives match."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple
from zlib import crc32

import numpy as np

from buffer.data.images import ImageFormat, SeenImage
from buffer.wire.protocol import Part, SampleRows
from buffer.wire.sample import AnySample, Sample, unpack_all
from learner.model.experts.mixture import Experts
from learner.model.forest import Text, lay_out_forest
from learner.model.microbatch import Microbatch, lay_out
from learner.train import collectives
from learner.train.pictures import NOTHING_SEEN, PictureMismatch, Piece, Seen, num_patches, open_images, room, show
from learner.train.routes import RouteMismatch, laid_out, open_routes
from learner.train.teacher_rows import TeacherTop, pieces_of, teacher_row, top_of, with_top
from learner.train.trees import copies, grow

LEAST_SAVED = 0.03
"""Sharing must save at least this share of the tokens."""


@dataclass(frozen=True)
class Document:
    """A segment of a sample: to attention a text by itself."""

    row: int
    columns: Sequence[np.ndarray]
    """`Sample.DTYPES`, and sampled tokens' indices in `Batch.turns`, else -1: [tokens] each."""
    images: Sequence[SeenImage] = ()
    routes: np.ndarray | None = None
    teacher: np.ndarray | None = None
    """[tokens] float32: log-probabilities, 0 for given tokens."""
    top: TeacherTop | None = None

    @property
    def tokens(self) -> int:
        return len(self.columns[0])

    @property
    def prompt(self) -> int:
        return int(self.columns[1].argmax())


class Turns(NamedTuple):
    """A rank's turns. A sample's last turn has its reward, if turns have none."""

    rows: np.ndarray
    rewards: np.ndarray


@dataclass(frozen=True)
class Unit:
    """Documents that share their prompt, which is computed once, or a single one."""

    documents: Sequence[Document]
    prompt: int

    @property
    def answers(self) -> list[int]:
        return [document.tokens - self.prompt for document in self.documents]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.answers)

    @property
    def images(self) -> list[SeenImage]:
        return [image for document in self.documents for image in document.images]

    @property
    def squares(self) -> int:
        return self.prompt**2 + sum(n * (n + 2 * self.prompt) for n in self.answers)

    @property
    def saves(self) -> float:
        saved = (len(self.documents) - 1) * self.prompt
        return saved / (saved + self.tokens)


@dataclass(frozen=True)
class Tree:
    """Documents that each go on from the one before."""

    documents: Sequence[Document]
    joined: Sequence[int]
    """First tokens of each document that the one before it computes."""

    @property
    def tokens(self) -> int:
        return sum(document.tokens for document in self.documents) - sum(self.joined)

    @property
    def images(self) -> list[SeenImage]:
        return []

    @property
    def squares(self) -> int:
        both = zip(self.documents, self.joined, strict=True)
        return sum(document.tokens**2 - joined**2 for document, joined in both)

    @property
    def copies(self) -> int:
        return sum(copies(document.tokens, n) for document, n in zip(self.documents, self.joined, strict=True))


@dataclass(frozen=True)
class Batch:
    """A rank's microbatches, and a row per sample of the batch."""

    version: int
    rows: SampleRows
    num_versions: list[int]
    num_segments: list[int]
    turns: Turns
    scattered: bool
    microbatches: list[Microbatch]
    tokens: int
    squares: int
    alone: tuple[int, int]
    undone: tuple[int, int] = (0, 0)
    teachers: Mapping[int, str] = field(default_factory=dict)
    teacher_kl: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def head_rows(self) -> int:
        return sum(microbatch.head_rows for microbatch in self.microbatches)

    @classmethod
    def from_part(
        cls,
        part: Part,
        budget: int,
        quadratic: float = 0.0,
        share_prompts: bool = False,
        form: ImageFormat | None = None,
        patch_cost: float = 0.0,
        replayed: Experts | None = None,
        key_room: float | None = None,
    ) -> "Batch":
        """Pack `part` into microbatches of at most `budget` tokens and PATCHES_PER_TOKEN patches for each; a longer
        document gets its own. A document of n tokens costs n + quadratic * n². `key_room`: tokens of the budget that a
        copied key takes; None: only prompts are shared. Raises, on all ranks, RuntimeError when their parts are not of
        one batch, PictureMismatch or RouteMismatch."""
        opened = open_part(part, budget, share_prompts, form, replayed, key_room)
        agreed = agree(opened, budget)
        return pack_all(opened, agreed, budget, quadratic, patch_cost)


class Opened(NamedTuple):
    """A rank's part, decoded. `sizes`: tokens of the budget that each unit takes."""

    part: Part
    units: Sequence[Unit | Tree]
    sizes: Sequence[int]
    num_versions: list[int]
    num_segments: list[int]
    turns: Turns
    misrouted: str
    unseen: str
    teachers: dict[int, str]
    teacher_kl: dict[str, tuple[float, int]]


class Agreed(NamedTuple):
    """What all ranks know of a batch."""

    microbatches: int
    scattered: bool


def open_part(
    part: Part,
    budget: int,
    share_prompts: bool,
    form: ImageFormat | None,
    replayed: Experts | None,
    key_room: float | None = None,
) -> Opened:
    """Decode the samples of `part` into units."""
    samples, rows = unpack_all(part.samples), part.positions.numpy().tolist()
    seen, unseen = open_images(part, samples, form)
    routes, misrouted = open_routes(part, samples, replayed)
    documents, turns = documents_of(samples, rows, seen, routes)
    items = part.rows.item.numpy()
    units: Sequence[Unit | Tree] = shared_units(documents, items, budget) if share_prompts else alone(documents)
    if key_room is not None:
        trees = trees_of(documents, items, budget, key_room)
        units = trees if tokens_of(trees) <= (1 - LEAST_SAVED) * tokens_of(units) else units
    sizes = [room(unit.tokens + _room_of_copies(unit, key_room), unit.images) for unit in units]
    versions, segments = versions_of(samples), [len(sample.starts) for sample in samples]
    taught = teachers_of(samples, rows), teacher_kl(samples)
    return Opened(part, units, sizes, versions, segments, turns, misrouted, unseen, *taught)


def agree(opened: Opened, budget: int) -> Agreed:
    """Compare the ranks' parts. A collective. Raises as `Batch.from_part`."""
    version, rows = opened.part.version, opened.part.rows
    least, digest = max(len(first_fit(opened.sizes, budget)), 1), crc32(rows.item.data + rows.reward.data)
    mine = (least, version, -version, digest, -digest, max(opened.num_segments, default=0))
    agreed = collectives.all_reduce_max(*mine, bool(opened.misrouted), bool(opened.unseen))
    number, newest, oldest, largest, smallest, most, misrouted, unseen = map(int, agreed)
    if (newest, largest) != (-oldest, -smallest):
        raise RuntimeError(f"not one batch: parts of versions {-oldest} to {newest}, of other samples if these agree")
    if unseen:
        raise PictureMismatch(opened.unseen or "another rank has an image that is not what the policy saw")
    if misrouted:
        raise RouteMismatch(opened.misrouted or "another rank has a sample without routes that can be replayed")
    return Agreed(number, most > 1 and number > 1)


def pack_all(opened: Opened, agreed: Agreed, budget: int, quadratic: float, patch_cost: float) -> Batch:
    """Pack the units into microbatches of similar cost."""
    part, units = opened.part, opened.units
    costs = [each.tokens + quadratic * each.squares + patch_cost * num_patches(each.images) for each in units]
    bins = balance(opened.sizes, costs, budget, agreed.microbatches)
    return Batch(
        version=part.version,
        rows=part.rows,
        num_versions=opened.num_versions,
        num_segments=opened.num_segments,
        turns=opened.turns,
        scattered=agreed.scattered,
        microbatches=[pack([units[i] for i in chosen]) for chosen in bins],
        tokens=tokens_of(units),
        squares=sum(unit.squares for unit in units),
        alone=_alone(units),
        undone=(part.restored, part.reached),
        teachers=opened.teachers,
        teacher_kl=opened.teacher_kl,
    )


def teachers_of(samples: Sequence[AnySample], rows: Sequence[int]) -> dict[int, str]:
    """The teacher of each sample that has one."""
    whole = [(sample, row) for sample, row in zip(samples, rows, strict=True) if isinstance(sample, Sample)]
    return {row: sample.teacher_name for sample, row in whole if sample.teacher_logprobs is not None}


def teacher_kl(samples: Sequence[AnySample]) -> dict[str, tuple[float, int]]:
    """Sum of log mu - log q and sampled tokens, by teacher."""
    found = dict[str, tuple[float, int]]()
    for sample in samples:
        if isinstance(sample, Sample) and sample.teacher_logprobs is not None:
            sampled = sample.sampled.numpy() != 0
            gap = sample.behaviour_logprobs.numpy().astype(float) - sample.teacher_logprobs.numpy()
            total, number = found.get(sample.teacher_name, (0.0, 0))
            found[sample.teacher_name] = total + float(gap[sampled].sum()), number + int(sampled.sum())
    return found


def documents_of(
    samples: Sequence[AnySample],
    rows: Sequence[int],
    seen: Seen = NOTHING_SEEN,
    routes: Sequence[np.ndarray | None] | None = None,
) -> tuple[list[Document], Turns]:
    """Segments and turns of `samples`, whose indices in `Batch.rows` are `rows`."""
    starts, whole = starts_of(samples), [column_of(samples, name) for name in Sample.DTYPES]
    turn, numbers = turns_of(column_of(samples, "sampled") != 0, starts)
    whole.append(turn)
    documents, rewards = list[Document](), list[float]()
    every = zip(samples, rows, routes or [None] * len(samples), starts.tolist(), numbers, strict=True)
    for sample, row, routed, at, number in every:
        rewards += sample.turn_rewards or [*[0.0] * (number - 1), sample.reward]
        taught = None if sample.teacher_logprobs is None else sample.teacher_logprobs.numpy()
        for start, stop in sample.bounds:
            columns = [column[at + start : at + stop] for column in whole]
            images = [image._replace(start=image.start - start) for image in seen.get(row, ()) if image.start >= start]
            inside = [image for image in images if image.start < stop - start]
            own, given = (None if each is None else each[start:stop] for each in (routed, taught))
            documents.append(Document(row, columns, inside, own, given, top_of(sample, start, stop)))
    return documents, Turns(np.repeat(np.array(rows, np.int64), numbers), np.array(rewards, np.float64))


def starts_of(samples: Sequence[AnySample]) -> np.ndarray:
    """Where each sample begins in `column_of`."""
    return np.cumsum([0, *(sample.num_tokens for sample in samples)])[:-1]


def column_of(samples: Sequence[AnySample], name: str) -> np.ndarray:
    """One of `Sample.DTYPES`, of all samples: NumPy takes longer to call than to work on one."""
    place = list(Sample.DTYPES).index(name)
    return np.frombuffer(b"".join([sample.columns[place] for sample in samples]), Sample.DTYPES[name])


def turns_of(sampled: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The turn of each sampled token, else -1: [tokens] int64; and each sample's number of turns."""
    runs = np.flatnonzero(np.diff(sampled, prepend=~sampled[:1]))  # of sampled or given tokens
    own = sampled[runs]  # no segment begins with a sampled token
    turn = np.repeat(np.where(own, own.cumsum() - 1, -1), np.diff(runs, append=sampled.size))
    owners = np.searchsorted(starts, runs[own], side="right") - 1
    return turn, np.bincount(owners, minlength=len(starts)).tolist()


def versions_of(samples: Sequence[AnySample]) -> list[int]:
    """How many versions sampled each sample."""
    sampled, versions = column_of(samples, "sampled") != 0, column_of(samples, "versions")
    owners = np.repeat(np.arange(len(samples)), np.add.reduceat(sampled, starts_of(samples), dtype=np.int64))
    pairs = owners * 2**32 + versions[sampled].view(np.uint32)
    ends_of_runs = np.diff(pairs, append=-1) != 0
    found: list[int] = np.bincount(np.unique(pairs[ends_of_runs]) >> 32, minlength=len(samples)).tolist()
    return found


def alone(documents: Sequence[Document]) -> list[Unit]:
    """Each document by itself."""
    return [Unit([document], 0) for document in documents]


def shared_units(documents: Sequence[Document], items: np.ndarray, budget: int) -> list[Unit]:
    """Units of at most `budget` tokens. Documents that would save less than LEAST_SAVED stay separate. `items`: of each
    row of the batch."""
    groups: dict[tuple[int, bytes, tuple[str, ...]], list[Document]] = defaultdict(list)
    for document in documents:
        prompt = document.columns[0][: document.prompt]
        shown = tuple(image.picture.digest for image in document.images if image.start < len(prompt))
        groups[items[document.row], prompt.tobytes(), shown].append(document)
    units = []
    for group in groups.values():
        whole = Unit(group, group[0].prompt)
        before = room(whole.prompt, [image for image in group[0].images if image.start < whole.prompt])
        behind = [[image for image in each.images if image.start >= whole.prompt] for each in group]
        answers = list(map(room, whole.answers, behind))
        for chosen in first_fit(answers, max(budget - before, 1)):
            unit = Unit([group[i] for i in chosen], whole.prompt)
            units += [unit] if unit.saves >= LEAST_SAVED else alone(unit.documents)
    return units


def trees_of(documents: Sequence[Document], items: np.ndarray, budget: int, key_room: float) -> list[Unit | Tree]:
    """The documents of each item in trees."""
    of_items: dict[int, list[Document]] = defaultdict(list)
    for document in documents:
        of_items[items[document.row]].append(document)
    found: list[Unit | Tree] = []
    for group in of_items.values():
        for tree in grow([document.columns[0] for document in group], budget, key_room):
            chosen, joined = [group[i] for i, _ in tree], [number for _, number in tree]
            found += [Tree(chosen, joined)] if len(chosen) > 1 else alone(chosen)
    return found


def tokens_of(units: Sequence[Unit | Tree]) -> int:
    """Tokens of the units' rows."""
    return sum(unit.tokens for unit in units)


def _room_of_copies(unit: Unit | Tree, key_room: float | None) -> int:
    return ceil(unit.copies * key_room) if isinstance(unit, Tree) and key_room else 0


def _alone(units: Sequence[Unit | Tree]) -> tuple[int, int]:
    lengths = [document.tokens for unit in units for document in unit.documents]
    return sum(lengths), sum(length**2 for length in lengths)


def pack(units: Sequence[Unit | Tree]) -> Microbatch:
    """A microbatch of `units`; of none, a dummy without trainable tokens."""
    if not units:
        return lay_out([np.zeros(2)], [np.zeros(2)], [np.zeros(2)], [np.full(2, -1)], [0])
    plain = [unit for unit in units if isinstance(unit, Unit)]
    return pack_plain(plain) if len(plain) == len(units) else pack_trees(units)


def pack_trees(units: Sequence[Unit | Tree]) -> Microbatch:
    """A row of trees and single documents."""
    texts = []
    for unit in units:
        assert isinstance(unit, Tree) or len(unit.documents) == 1
        for document, joined in zip(unit.documents, unit.joined if isinstance(unit, Tree) else [0], strict=True):
            assert document.routes is None and not document.images, "PrefixSharing.no_trees"
            tokens, sampled, behaviour, versions, turns = document.columns
            texts.append(Text(tokens, sampled, behaviour, versions, turns, document.teacher, document.row, joined))
    return lay_out_forest(texts)


def pack_plain(units: Sequence[Unit]) -> Microbatch:
    """A row of units that share prompts."""
    shared = [unit for unit in units if len(unit.documents) > 1]
    pieces = [(unit.documents[0], slice(unit.prompt)) for unit in shared]
    pieces += [(document, slice(unit.prompt, None)) for unit in shared for document in unit.documents]
    pieces += [(unit.documents[0], slice(None)) for unit in units if len(unit.documents) == 1]
    columns = zip(*([column[part] for column in document.columns] for document, part in pieces), strict=True)
    tokens, sampled, behaviour, versions, turns = columns
    rows, groups = [document.row for document, _ in pieces], [len(unit.documents) for unit in shared]
    packed = lay_out(tokens, sampled, behaviour, versions, rows, groups, turns)
    routes = [document.routes if document.routes is None else document.routes[part] for document, part in pieces]
    taught = [None if document.teacher is None else document.teacher[part] for document, part in pieces]
    packed = replace(packed, routes=laid_out(routes), teacher=teacher_row(taught, pieces_of(packed)))
    packed = with_top(packed, [document.top for document, _ in pieces])
    pictured = [Piece(document.images, document.tokens, part) for document, part in pieces]
    return show(packed, pictured)


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: indices of `lengths` in bins of at most `budget`."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        b = next((b for b, left in enumerate(free) if lengths[i] <= left), len(bins))
        if b == len(bins):
            bins.append([])
            free.append(budget)
        bins[b].append(i)
        free[b] -= lengths[i]
    return bins


def balance(lengths: Sequence[int], costs: Sequence[float], budget: int, number: int) -> list[list[int]]:
    """Indices of `lengths` in `number` bins of similar cost, the costliest first; the bins of `first_fit` where
    balancing exceeds the budget."""
    bins: list[list[int]] = [[] for _ in range(number)]
    load, used = [0.0] * number, [0] * number
    for i in sorted(range(len(lengths)), key=lambda i: -costs[i]):
        fits = [b for b in range(number) if used[b] + lengths[i] <= budget or not bins[b]]
        if not fits:
            tight = first_fit(lengths, budget)
            bins = tight + [[] for _ in range(number - len(tight))]
            break
        b = min(fits, key=load.__getitem__)
        bins[b].append(i)
        load[b] += costs[i]
        used[b] += lengths[i]
    return sorted(bins, key=lambda chosen: -sum(costs[i] for i in chosen))
