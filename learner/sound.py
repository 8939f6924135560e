"""Judges each batch, and has the buffer put groups that cannot be trained into quarantine: `step` returns None, and the
loop takes the batch again without them. A batch with which the learner ended before is tried group by group, so that
the buffer knows the group at fault."""

import logging
import time
from collections.abc import Iterable, Mapping
from zlib import crc32

import numpy as np
import torch.distributed as dist

from buffer.data.images import ImageFormat
from buffer.wire.client import LearnerClient
from buffer.wire.message import Array
from buffer.wire.protocol import Part, SampleRows
from buffer.wire.sample import Sample, judge_all
from buffer.wire.values import Bounds, WrongValue
from learner.model.policy import Policy
from learner.train import collectives
from learner.train.pictures import PictureMismatch, open_images
from learner.train.skipped import may_retake
from learner.train.step import Algorithm

log = logging.getLogger(__name__)
NOT_FINITE = "its gradient is not finite, and that of other groups of batch {} is"
Found = Mapping[int, str]


class SoundSteps:
    """The steps of `algorithm`. `made_up`: the part of `rehearsal.py`."""

    def __init__(
        self, algorithm: Algorithm, batches: LearnerClient, bounds: Bounds, made_up: Part | None = None
    ) -> None:
        self.algorithm, self.batches, self.bounds, self.made_up = algorithm, batches, bounds, made_up

    def warm_up(self, policy: Policy) -> None:
        if self.made_up is None:
            return
        began = time.monotonic()
        self.algorithm.rehearse(policy, self.made_up)
        self.made_up = None
        log.info("full microbatches of made-up samples took %.0f s and fit into memory", time.monotonic() - began)

    def step(self, policy: Policy, part: Part) -> dict[str, float] | None:
        """As `Algorithm.step`; None: the batch must be taken again."""
        if self._reported(part, judged(part, self.bounds)):
            return None
        if part.suspect and self._reported(part, self._tried(policy, part)):
            return None
        try:
            stats = self.algorithm.step(policy, part)
        except PictureMismatch:
            found, every = mismatched(part, self.algorithm.form)
            if every:  # then the groups are not at fault
                raise
            self._reported(part, found)
            return None
        if may_retake(stats):
            log.warning("batch %d: trying each group by itself, to find what is not finite", part.version)
            if self._reported(part, self._tried(policy, part)):
                return None
        return stats

    def _reported(self, part: Part, found: Found) -> bool:
        """Report the groups that any rank has found. Returns whether the batch must be taken again, also because ranks
        have different groups. A collective."""
        digest = crc32(part.rows.item.data)
        some, largest, smallest = collectives.all_reduce_max(bool(found), digest, -digest)
        if not some and largest == -smallest:
            return False
        for item, reason in found.items():
            log.error("batch %d: item %d cannot be trained, and goes into quarantine: %s", part.version, item, reason)
            self.batches.quarantine(item, reason)
        collectives.meet()  # no rank takes the batch before all have reported
        return True

    def _tried(self, policy: Policy, part: Part) -> Found:
        """The groups whose gradient is not finite; none if no group's is: then the policy is at fault. A collective."""
        first, items = dist.get_rank() == 0, np.unique(part.rows.item.numpy()).tolist()
        if part.suspect and first:
            log.warning("the learner ended with batch %d before: trying its groups one by one", part.version)
        unfit = []
        for item in items:
            self._announce(part.version, item)
            if not self.algorithm.rehearse(policy, only(part, item)):
                unfit.append(item)
        self._announce(part.version, None)
        return dict.fromkeys(unfit, NOT_FINITE.format(part.version)) if first and len(unfit) < len(items) else {}

    def _announce(self, version: int, item: int | None) -> None:
        if dist.get_rank() == 0:
            self.batches.try_alone(version, item)
        collectives.meet()


def bounds_of(
    policy: Policy, form: ImageFormat | None, teachers: Iterable[str] | None = None, top_k: int | None = None
) -> Bounds:
    sizes = policy.mixture.sizes if policy.mixture else None
    return Bounds(
        vocabulary=policy.model.config.get_text_config().vocab_size,
        experts=sizes.number if sizes else 0,
        routed=(sizes.layers, sizes.top_k) if sizes else None,
        placeholder=form.image_token if form else None,
        replayed=policy.replayed is not None,
        teachers=None if teachers is None else frozenset(teachers),
        top_k=top_k,
    )


def judged(part: Part, bounds: Bounds) -> Found:
    """Groups with an impossible value in this part."""
    newest, found = max(part.version, part.reached), dict[int, str]()
    rows = part.positions.numpy()
    items = part.rows.item.numpy()[rows]
    judgements = judge_all(part.samples, bounds)
    for row, item, stats in zip(rows.tolist(), items.tolist(), judgements, strict=True):
        if isinstance(stats, WrongValue):
            found.setdefault(item, f"sample {row} of batch {part.version}: {stats}")
        elif stats.newest is not None and stats.newest > newest:
            what = f"sampled under version {stats.newest}, and no policy above version {newest} exists"
            found.setdefault(item, f"sample {row} of batch {part.version}: versions: {what}")
    return found


def mismatched(part: Part, form: ImageFormat | None) -> tuple[Found, bool]:
    """Groups with an image that is not what the policy saw; and whether all groups with images are such. A
    collective."""
    found, showing = dict[int, str](), 0
    for item in np.unique(part.rows.item.numpy()).tolist():
        own = only(part, item)
        samples = [Sample.unpack(data) for data in own.samples]
        if any(sample.images for sample in samples):
            showing += 1
            if problem := open_images(own, samples, form)[1]:
                found[item] = problem
    (sound,) = collectives.all_reduce_max(showing > len(found))
    return found, not sound


def only(part: Part, item: int) -> Part:
    rows = np.flatnonzero(part.rows.item.numpy() == item)
    columns = {name: getattr(part.rows, name) for name in SampleRows.model_fields if name != "metrics"}
    chosen = SampleRows(
        **{name: Array.of(column.numpy()[rows]) for name, column in columns.items()},
        metrics={name: Array.of(column.numpy()[rows]) for name, column in part.rows.metrics.items()},
    )
    positions = part.positions.numpy()
    mine = np.flatnonzero(np.isin(positions, rows)).tolist()
    return part.model_copy(
        update={
            "rows": chosen,
            "positions": Array.of(np.searchsorted(rows, positions[mine]).astype(np.int64)),
            "samples": [part.samples[place] for place in mine],
            "images": [image for image in part.images if image.item == item],
        }
    )
