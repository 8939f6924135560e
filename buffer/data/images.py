"""How a vision-language model sees an image.

Rollout servers and the learner turn the same file into the same pixels with `decode`, so only the file travels; a
digest of the pixels shows that both ends saw the same.
"""

import hashlib
import io
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, isqrt, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from configs.architecture import MUTUAL, reads_images, text_config, trains_text_alone
from configs.load import ConfigError
from configs.schema import Config, DataConfig

FILE_KINDS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""PIL would run other programs for some others."""
MAX_ASPECT = 200
"""As in transformers' `smart_resize`."""
ROUNDING = 1e-9
"""Relative error of `ImageFormat.size` in floating point, and more."""
MAX_SOURCE_PIXELS = 89_478_485
"""PIL's own bound against files that grow to gigabytes."""
BROKEN = (
    *(OSError, EOFError, SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError),
    *(NotImplementedError, struct.error, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning),
)


class ImageError(ValueError):
    """An image that no model can be shown; one line."""


@dataclass(frozen=True)
class ImageFormat:
    """Qwen2.5-VL has patches of 14 x 14 pixels and a token for each 2 x 2 of them."""

    model_type: str
    patch: int
    """Side, in pixels."""
    merge: int
    """A token is `merge` x `merge` patches."""
    temporal: int
    """Frames of a patch; an image is repeated so often."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_pixels: int
    max_pixels: int
    image_token: int
    """The placeholder."""
    vision_start: int
    vision_end: int
    side: int | None = None
    """Side of the squares to which images are stretched."""

    @classmethod
    def of_run(cls, config: Config) -> "ImageFormat | None":
        model = config.model
        return cls.of(model.path, config.data, tuple(model.freeze), model.text_alone)

    @classmethod
    def of(
        cls, model_path: str, data: DataConfig, freeze: tuple[str, ...] = (), text_alone: bool = False
    ) -> "ImageFormat | None":
        """None for a model of text alone. Raises ConfigError."""
        config = read_model_file(model_path, "config.json")
        if config is None:
            raise ConfigError([f"model.path: {model_path}: has no config.json; name a folder in Hugging Face format"])
        kind, vision = config.get("model_type"), config.get("vision_config")
        if not reads_images(config, text_alone):
            alone = trains_text_alone(config, text_alone)
            why = f"({kind}) is trained on text alone" if alone else "is no vision-language model"
            if freeze:
                problem = f"model.freeze: [{', '.join(freeze)}]: {model_path} {why}"
                raise ConfigError([f"{problem}; remove the key"])
            if text_alone and not alone:
                raise ConfigError([f"model.text_alone: true: {model_path} {why}; remove the key"])
            return None
        given = read_model_file(model_path, "preprocessor_config.json")
        given = given or (read_model_file(model_path, "processor_config.json") or {}).get("image_processor")
        try:
            if kind in MUTUAL:
                return cls._of_squares(model_path, config, given or {}, data)
            return cls._from(config, vision or {}, given or {}, data)
        except KeyError as error:
            problem = f"neither config.json nor preprocessor_config.json says {error.args[0]}"
            raise ConfigError([f"model.path: {model_path}: {problem}; fetch the model anew"]) from None

    @classmethod
    def _from(
        cls, config: dict[str, Any], vision: dict[str, Any], given: dict[str, Any], data: DataConfig
    ) -> "ImageFormat":
        """Qwen2.5-VL calls the bounds `min_pixels` and `max_pixels`, later models `size`."""
        size, least, most = given.get("size") or {}, data.min_pixels, data.max_pixels
        own_least = given["min_pixels"] if given.get("min_pixels") else size["shortest_edge"]
        own_most = given["max_pixels"] if given.get("max_pixels") else size["longest_edge"]
        if (least or own_least) > (most or own_most):
            line = f"data.min_pixels: {least or own_least}{'' if least else ' of the model itself'} is more than"
            line += f" data.max_pixels {most or own_most}{'' if most else ' of the model itself'}"
            raise ConfigError([f"{line}; lower it or raise data.max_pixels"])
        red, green, blue = given["image_mean"]
        deviations = given["image_std"]
        return cls(
            model_type=config["model_type"],
            patch=vision["patch_size"],
            merge=vision["spatial_merge_size"],
            temporal=vision["temporal_patch_size"],
            mean=(red, green, blue),
            std=(deviations[0], deviations[1], deviations[2]),
            min_pixels=least or own_least,
            max_pixels=most or own_most,
            image_token=config["image_token_id"],
            vision_start=config["vision_start_token_id"],
            vision_end=config["vision_end_token_id"],
        )

    @classmethod
    def _of_squares(
        cls, model_path: str, config: dict[str, Any], given: dict[str, Any], data: DataConfig
    ) -> "ImageFormat":
        vision, tokens = config["vision_config"], config["mm_tokens_per_image"]
        side, patch = vision["image_size"], vision["patch_size"]
        merge, area = side // patch // isqrt(tokens), side**2
        if problems := list(_unlike_squares(config, given, merge)):
            raise ConfigError([f"model.path: {model_path}: {problem}" for problem in problems])
        if (data.min_pixels or area) > area or (data.max_pixels or area) < area:
            bounds = f"data.min_pixels: {data.min_pixels}, data.max_pixels: {data.max_pixels}"
            raise ConfigError([f"{bounds}: {model_path} sees every image in {area} pixels; set both to null"])
        red, green, blue = given["image_mean"]
        deviations = given["image_std"]
        return cls(
            model_type=config["model_type"],
            patch=patch,
            merge=merge,
            temporal=1,
            mean=(red, green, blue),
            std=(deviations[0], deviations[1], deviations[2]),
            min_pixels=area,
            max_pixels=area,
            image_token=_token(config, "image_token"),
            vision_start=_token(config, "boi_token"),
            vision_end=_token(config, "eoi_token"),
            side=side,
        )

    @property
    def mutual(self) -> bool:
        """Tokens of an image see later ones too."""
        return self.model_type in MUTUAL

    @property
    def padding(self) -> str:
        return "\n\n" if self.mutual else ""

    @property
    def factor(self) -> int:
        return self.patch * self.merge

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) as by transformers' `smart_resize`, or a square. Raises ImageError."""
        if self.side is not None:
            return self.side, self.side
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise ImageError(f"an image of {width} x {height} pixels; one side may be {MAX_ASPECT} times the other")
        factor = self.factor
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        if high * wide > self.max_pixels:
            scale = sqrt(height * width / self.max_pixels)
            high = max(factor, floor(height / scale / factor) * factor)
            wide = max(factor, floor(width / scale / factor) * factor)
        elif high * wide < self.min_pixels:
            scale = sqrt(self.min_pixels / (height * width))
            high, wide = ceil(height * scale / factor) * factor, ceil(width * scale / factor) * factor
        return high, wide

    @cached_property
    def max_tokens(self) -> int:
        """Most tokens of an image. `max_pixels` may have fewer: sides are at least one `factor` long, and those of an
        image that is enlarged are rounded up."""
        if self.side is not None:
            return (self.side // self.factor) ** 2
        most, least = (pixels * (1 + ROUNDING) / self.factor**2 for pixels in (self.max_pixels, self.min_pixels))
        narrow = sqrt(least / MAX_ASPECT)  # the shorter side, in tokens, of the narrowest image that is enlarged
        enlarged = (n * ceil(least / max(n - 1, narrow)) for n in range(ceil(narrow), ceil(sqrt(least)) + 1))
        return max(1, floor(most), floor(sqrt(MAX_ASPECT * most)), *enlarged)

    def levels(self) -> np.ndarray:
        """float32 [256, 3]: what the model sees of each byte."""
        return ((np.arange(256)[:, None] / 255 - self.mean) / self.std).astype(np.float32)

    def num_tokens(self, height: int, width: int) -> int:
        """Tokens of an image before it is resized. Raises ImageError."""
        high, wide = self.size(height, width)
        return high * wide // self.factor**2


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as the model sees it."""

    pixels: np.ndarray
    """uint8 [height, width, 3]; multiples of `format.factor`."""
    format: ImageFormat

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(struct.pack("<II", *self.pixels.shape[:2]) + self.pixels.tobytes()).hexdigest()

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches in time, height and width."""
        height, width, _ = self.pixels.shape
        return 1, height // self.format.patch, width // self.format.patch

    @property
    def num_tokens(self) -> int:
        _, high, wide = self.grid
        return high * wide // self.format.merge**2

    def cells(self) -> np.ndarray:
        """uint8 [patches, 3, patch²], patches of a token side by side."""
        form, (_, high, wide) = self.format, self.grid
        split = self.pixels.reshape(
            high // form.merge, form.merge, form.patch, wide // form.merge, form.merge, form.patch, 3
        )
        return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(high * wide, 3, form.patch**2)

    def planes(self, levels: np.ndarray | None = None) -> np.ndarray:
        """[3, height, width], for a model that takes no patches."""
        levels = self.format.levels() if levels is None else levels
        return np.stack([levels[:, colour][self.pixels[:, :, colour]] for colour in range(3)])

    def patches(self, levels: np.ndarray | None = None) -> np.ndarray:
        """[patches, 3 * temporal * patch²]: transformers' `pixel_values`. `levels`: [256, 3], what each byte becomes
        instead."""
        cells, form = self.cells(), self.format
        levels = form.levels() if levels is None else levels
        values = np.empty((len(cells), 3, form.temporal, form.patch**2), levels.dtype)
        for colour in range(3):  # one after the other takes half as long as all at once
            values[:, colour] = levels[:, colour][cells[:, colour]][:, None]
        return values.reshape(len(cells), -1)


class SeenImage(NamedTuple):
    """An image among tokens; its placeholders begin at `start`."""

    start: int
    picture: Picture


def decode(data: bytes, form: ImageFormat) -> Picture:
    """Raises ImageError."""
    image = _opened(data)
    try:
        upright = _rgb(ImageOps.exif_transpose(image))
    except BROKEN as error:
        raise ImageError(f"a {image.format} file that cannot be decoded: {_line(error)}") from None
    height, width = form.size(upright.height, upright.width)
    how = Image.Resampling.BICUBIC if form.side is None else Image.Resampling.BILINEAR
    return Picture(np.asarray(upright.resize((width, height), how)), form)


def source_size(data: bytes) -> tuple[int, int]:
    """Upright (height, width), without decoding. Raises ImageError."""
    image = _opened(data)
    try:
        turned = image.getexif().get(ORIENTATION, 1) in TURNED
    except BROKEN as error:
        raise ImageError(f"a {image.format} file with a broken header: {_line(error)}") from None
    return (image.width, image.height) if turned else (image.height, image.width)


def _token(config: dict[str, Any], name: str) -> int:
    """Files call it `NAME_index` or `NAME_id`."""
    index = config.get(f"{name}_index")
    return int(config[f"{name}_id"] if index is None else index)


def _unlike_squares(config: dict[str, Any], given: dict[str, Any], merge: int) -> Iterator[str]:
    vision, tokens, again = config["vision_config"], config["mm_tokens_per_image"], "fetch the model anew"
    side, sizes = vision["image_size"], given["size"]
    window = text_config(config).get("sliding_window")
    if vision.get("vision_use_head", True):
        yield "its tower has a head that images do not pass (vision_use_head); set model.text_alone: true"
    if (merge * vision["patch_size"]) ** 2 * tokens != side**2:
        yield f"an image of {side} x {side} pixels is not {tokens} squares of whole patches; {again}"
    if given.get("do_pan_and_scan"):
        yield "do_pan_and_scan, which cuts images into several, is not trained; set it to false"
    if (sizes["height"], sizes["width"]) != (side, side):
        sides = f"{sizes['width']} x {sizes['height']}"
        yield f"its processor makes images of {sides} pixels, its tower takes {side} x {side}; {again}"
    if window is not None and tokens > window:
        problem = f"an image has {tokens} tokens, more than the sliding window of {window}"
        yield f"{problem}, and servers compute it otherwise than the learner; set model.text_alone: true"


def counted(number: int, noun: str) -> str:
    """`counted(1, "image")` is `1 image`, `counted(1000, "row")` is `1,000 rows`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""EXIF values for which height and width change places."""


def _opened(data: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=FILE_KINDS)
    except UnidentifiedImageError:
        begins = f"begins with {bytes(data[:8])!r}" if data else "is empty"
        raise ImageError(f"no image: the file {begins}; {', '.join(FILE_KINDS)} are read") from None
    except BROKEN as error:
        raise ImageError(f"an image file that cannot be opened: {_line(error)}") from None
    if image.width * image.height > MAX_SOURCE_PIXELS:
        raise ImageError(f"an image of {image.width} x {image.height} pixels; {MAX_SOURCE_PIXELS:,} are read at most")
    return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # PIL would cut values above 255 off
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ImageError(
            f"32 bits a pixel (mode {image.mode}) have no known white; save the image with 8 bits a channel"
        )
    if "transparency" in image.info:  # PIL warns if it has to drop a palette's
        image = image.convert("RGBA")
    return image.convert("RGB")


def read_model_file(model_path: str, name: str) -> dict[str, Any] | None:
    """A JSON file of a model; None if the model has none of that name."""
    try:
        file = _file(model_path, name)
        found = json.loads(file.read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"model.path: {model_path}: {name} cannot be read: {_line(error)}"]) from None
    if found is not None and not isinstance(found, dict):
        raise ConfigError([f"model.path: {model_path}: {name} holds no JSON object; download the model again"])
    return found


def _file(model_path: str, name: str) -> Path | None:
    file = Path(model_path) / name
    if file.parent.is_dir():
        return file if file.exists() else None
    from huggingface_hub import hf_hub_download  # slow; a model in a folder does not pay for it
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(model_path, name))
    except RemoteEntryNotFoundError:
        return None
    except LocalEntryNotFoundError as error:
        raise OSError("it is not on this machine, and the hub cannot be reached") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
