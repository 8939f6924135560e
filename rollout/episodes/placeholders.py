"""Placeholders of images: given ones need their image, sampled ones are text."""

from collections.abc import Iterator, Sequence

import numpy as np

from buffer.data.images import ImageFormat, counted
from rollout.tasks.trajectory import PlacedImage


class SampledSoFar:
    """What the policy sampled, whatever the task made of it."""

    def __init__(self) -> None:
        self._turns: list[tuple[list[int], list[int]]] = []

    def add(self, tokens: list[int], completion: list[int]) -> None:
        self._turns.append((list(tokens), completion))

    def among(self, tokens: list[int]) -> np.ndarray:
        """Return bool [tokens]: which ones the policy sampled after these very tokens."""
        sampled = np.zeros(len(tokens), bool)
        for before, completion in self._turns:
            if tokens[: len(before)] == before:
                pairs = enumerate(zip(tokens[len(before) :], completion, strict=False))
                length = next((number for number, (ours, theirs) in pairs if ours != theirs), len(completion))
                sampled[len(before) : len(before) + length] = True
        return sampled


def misplaced(
    tokens: list[int], sampled: np.ndarray, images: Sequence[PlacedImage], form: ImageFormat | None, most: int
) -> Iterator[str]:
    """Yield the faults of `images`. `sampled`: [tokens]."""
    if not all(isinstance(image, PlacedImage) for image in images):
        yield f"images are {images!r:.200}; a list of PlacedImage is needed, as Trajectory.images"
        return
    if form is None:
        if images:
            yield f"{counted(len(images), 'image')} for a model that sees none"
        return
    if len(images) > most:
        yield f"{counted(len(images), 'image')}; data.max_images is {most}"
    left, end = (np.array(tokens) == form.image_token) & ~np.asarray(sampled, bool), 0
    for number, image in enumerate(images):
        if image.start < end or image.end > len(tokens) or not left[image.start : image.end].all():
            needed = f"takes tokens {image.start} to {image.end}, and not all of these are placeholders of its own"
            yield f"image {number} {needed}; append images with Trajectory.show"
            return
        left[image.start : image.end], end = False, image.end
    if left.any():
        remedy = "append images with Trajectory.show, and call generate(trajectory.tokens, images=trajectory.images)"
        yield f"the placeholder at {np.argmax(left)} has no image; {remedy}"
