"""The images of demonstrations. All ranks hold where they are in the texts; the pixels are decoded when they are
trained, and their digests compared with those at the start."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from buffer.data.image_rows import IMAGES, ImageRows, JoinedImages
from buffer.data.images import ImageError, ImageFormat, Picture, SeenImage, decode
from buffer.data.parts import JoinedRows
from buffer.problems import demonstrated_images
from configs.schema import Config
from learner.model.vision import Grid
from learner.train import collectives
from learner.train.pictures import THREADS


class ImageChanged(RuntimeError):
    """An image of a demonstration is gone, or is not what it was at the start."""


class ReadPicture(NamedTuple):
    """A picture that was decoded at the start, without its pixels."""

    digest: str
    grid: Grid
    row: int
    """Of the source."""
    number: int
    """Among the images of its row."""


class ReadImage(NamedTuple):
    """A picture among tokens; its placeholders begin at `start`."""

    start: int
    picture: ReadPicture


class DemonstratedImages:
    """The image files of a source's rows."""

    def __init__(self, rows: JoinedRows, files: ImageRows | JoinedImages, form: ImageFormat) -> None:
        self._rows, self._files, self._form = rows, files, form

    @classmethod
    def of(cls, config: Config, where: str, rows: JoinedRows) -> "DemonstratedImages | None":
        """None if no row has images. Raises ConfigError for a model that is not trained with images."""
        found = demonstrated_images(config, where, rows)
        return cls(rows, *found) if found else None

    def of_row(self, row: int) -> dict[str, Sequence[bytes]]:
        """The column of images, if the row has some."""
        found = self._files.of(row)
        return {IMAGES: found} if found else {}

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
            picture = decode(files[read.number], self._form)
        except ImageError as error:
            raise ImageChanged(f"{place}: {error}") from None
        if picture.digest != read.digest:
            problem = f"its pixels have the digest {picture.digest[:12]}, and had {read.digest[:12]} at the start"
            raise ImageChanged(f"{place}: {problem}; give all nodes the same images and the same version of Pillow")
        return picture
