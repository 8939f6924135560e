"""The images of demonstrations. All ranks hold where they are in the texts; the pixels are decoded when they are
trained, and their digests compared with those at the start. A read waits for a file share that is away."""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from buffer.data.image_rows import IMAGES, ImageFiles, ImageRows, ImageUnavailable, JoinedImages
from buffer.data.images import ImageError, ImageFormat, Picture, SeenImage, decode
from buffer.data.parts import JoinedRows
from buffer.problems import demonstrated_images
from configs.schema import Config
from learner.model.vision import Grid
from learner.train import collectives
from learner.train.pictures import THREADS

log = logging.getLogger(__name__)
AWAY_S = 1.0
"""Until a read that failed because a file share is away is tried again."""
SHARE = 0.5
"""Of `learner.timeout_s`, for which a file share may be away: other ranks wait in a collective meanwhile."""


class ImageChanged(RuntimeError):
    """An image of a demonstration is gone, or is not what it was at the start."""


class ReadPicture(NamedTuple):
    """A picture that was decoded at the start, without its pixels."""

    digest: str
    grid: Grid
    row: int
    """Number of its row in the source."""
    number: int
    """Its place among the images of the row."""


class ReadImage(NamedTuple):
    """A picture among tokens; its placeholders begin at `start`."""

    start: int
    picture: ReadPicture


class Patience:
    """How long reads have failed because a file share is away. Threads share it."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._since: float | None = None

    def read(self, files: ImageFiles, number: int) -> bytes:
        """Image `number` of a row. Raises ImageError, and ImageUnavailable once its file share was away for long."""
        while True:
            try:
                data = files[number]
            except ImageUnavailable as error:
                now = time.monotonic()
                if self._since is None:
                    self._since = now
                    log.warning("images cannot be read now, and are tried again: %s", error)
                if now - self._since >= self._longest_s:
                    raise
                time.sleep(min(AWAY_S, self._longest_s))
            else:
                self._since = None
                return data


class DemonstratedImages:
    """The image files of a source's rows. `away_s`: the longest wait for their file share."""

    def __init__(self, rows: JoinedRows, files: ImageRows | JoinedImages, form: ImageFormat, away_s: float) -> None:
        self._rows, self._files, self._form, self._patience = rows, files, form, Patience(away_s)

    @classmethod
    def of(cls, config: Config, where: str, rows: JoinedRows) -> "DemonstratedImages | None":
        """None if no row has images. Raises ConfigError for a model that is not trained with images."""
        found = demonstrated_images(config, where, rows)
        return cls(rows, *found, SHARE * config.learner.timeout_s) if found else None

    def of_row(self, row: int) -> dict[str, Iterator[bytes]]:
        """The column of images, if the row has some. Each is read when it is asked for."""
        files = self._files.of(row)
        return {IMAGES: (self._patience.read(files, number) for number in range(len(files)))} if files else {}

    def open(self, texts: Sequence[Sequence[ReadImage]]) -> list[list[SeenImage]]:
        """Decode the images of texts, each picture once. A collective. Raises ImageChanged, on all ranks."""
        distinct = {image.picture.digest: image.picture for images in texts for image in images}
        opened, problem = dict[str, Picture](), ""
        try:
            with ThreadPoolExecutor(THREADS) as threads:
                opened = dict(zip(distinct, threads.map(self._decoded, distinct.values()), strict=True))
        except ImageChanged as changed:
            problem = str(changed)
        if any(collectives.all_reduce_max(bool(problem))):
            raise ImageChanged(problem or "another rank cannot train an image of its demonstrations")
        return [[SeenImage(image.start, opened[image.picture.digest]) for image in images] for images in texts]

    def _decoded(self, read: ReadPicture) -> Picture:
        place = f"{self._rows.place(read.row)}: image {read.number} of the row"
        files = self._files.of(read.row)
        assert files is not None, "the row had images when it was read"
        try:
            picture = decode(self._patience.read(files, read.number), self._form)
        except ImageError as error:
            raise ImageChanged(f"{place}: {error}") from None
        if picture.digest != read.digest:
            problem = f"its pixels have the digest {picture.digest[:12]}, and had {read.digest[:12]} at the start"
            raise ImageChanged(f"{place}: {problem}; give all nodes the same images and the same version of Pillow")
        return picture
