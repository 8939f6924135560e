"""Images as models see them: equal to transformers' own processor, and one line for each file that cannot be shown."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from buffer.data.images import FILE_KINDS, MAX_ASPECT, ImageError, ImageFormat, Picture, decode, source_size
from configs.load import ConfigError
from configs.schema import DataConfig

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
QWEN25 = ImageFormat("qwen2_5_vl", 14, 2, 2, *CLIP, 3136, 1_048_576, 5, 3, 4)
QWEN3 = ImageFormat("qwen3_vl", 16, 2, 2, (0.5,) * 3, (0.5,) * 3, 65_536, 1_048_576, 5, 3, 4)
GEMMA3 = ImageFormat("gemma3", 14, 4, 1, (0.5,) * 3, (0.5,) * 3, 896**2, 896**2, 5, 3, 4, side=896)
FORMATS = pytest.mark.parametrize("form", [QWEN25, QWEN3], ids=["qwen2_5_vl", "qwen3_vl"])
DATA = DataConfig(train=Path("train.parquet"))


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), np.uint8)


def file(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def processor(form: ImageFormat) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": form.min_pixels, "longest_edge": form.max_pixels},
        patch_size=form.patch,
        merge_size=form.merge,
        temporal_patch_size=form.temporal,
        image_mean=list(form.mean),
        image_std=list(form.std),
    )


@FORMATS
@pytest.mark.parametrize("size", [(300, 400), (64, 48), (333, 777), (1200, 1600), (30, 5000)])
def test_patches_are_those_of_transformers(form, size):
    picture = decode(file(Image.fromarray(noise(*size))), form)
    theirs = processor(form)(images=[Image.fromarray(picture.pixels)], return_tensors="np")
    ours = picture.patches()
    assert ours.dtype == np.float32 and ours.shape == theirs["pixel_values"].shape
    assert np.abs(ours - theirs["pixel_values"]).max() <= 1e-6
    assert [list(picture.grid)] == theirs["image_grid_thw"].tolist()
    assert picture.num_tokens == theirs["image_grid_thw"].prod() // form.merge**2 == form.num_tokens(*size)
    resized_by_theirs = processor(form)(images=[Image.fromarray(noise(*size))], return_tensors="np")["pixel_values"]
    assert np.abs(ours - resized_by_theirs).max() <= 1e-6


@pytest.mark.parametrize("size", [(300, 400), (64, 48), (333, 777), (1200, 1600), (30, 5000), (896, 896)])
def test_planes_are_those_of_transformers(size):
    """And the patches are cut out of them, token by token."""
    image = Image.fromarray(noise(*size))
    theirs = Gemma3ImageProcessorPil(size={"height": 896, "width": 896}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    picture, (want,) = decode(file(image), GEMMA3), theirs(images=[image], return_tensors="np")["pixel_values"]
    ours = picture.planes()
    assert ours.dtype == np.float32 and ours.shape == want.shape == (3, 896, 896)
    assert np.abs(ours - want).max() <= 1e-6
    assert picture.num_tokens == GEMMA3.num_tokens(*size) == 256 and picture.grid == (1, 64, 64)
    cells = want.reshape(3, 16, 4, 14, 16, 4, 14).transpose(1, 4, 2, 5, 0, 3, 6).reshape(4096, -1)
    assert np.abs(picture.patches() - cells).max() <= 1e-6


@FORMATS
@given(height=st.integers(1, 9000), width=st.integers(1, 9000))
def test_sizes_are_those_of_transformers(form, height, width):
    if max(height, width) > MAX_ASPECT * min(height, width):
        with pytest.raises(ImageError, match="200 times"):
            form.size(height, width)
        with pytest.raises(ValueError):
            smart_resize(height, width, form.factor, form.min_pixels, form.max_pixels)
        return
    size = form.size(height, width)
    assert size == smart_resize(height, width, form.factor, form.min_pixels, form.max_pixels)
    assert all(side % form.factor == 0 and side for side in size)
    assert form.size(*size) == size, "a picture stays as it is"


BOUNDS = [(3136, 1_048_576), (1, 100), (784, 784), (3136, 50_176), (90_000, 100_000), (1_048_576,) * 2]


@FORMATS
@given(bounds=st.sampled_from(BOUNDS), short=st.integers(1, 3000), aspect=st.floats(1, 200), high=st.booleans())
def test_no_image_has_more_tokens_than_memory_is_planned_for(form, bounds, short, aspect, high):
    form = replace(form, min_pixels=bounds[0], max_pixels=bounds[1])
    size = (int(short * aspect), short) if high else (short, int(short * aspect))
    assert form.num_tokens(*size) <= form.max_tokens


@pytest.mark.parametrize(
    ("bounds", "size", "tokens"),
    [
        ((3136, 1_048_576), (7 * 28, 191 * 28), 1337),  # as many as max_pixels holds
        ((3136, 50_176), (20, 4000), 113),  # a strip, whose shorter side cannot be made smaller
        ((784, 784), (1, 200), 15),
        ((1_048_576, 1_048_576), (2, 297), 1784),  # enlarged, with both sides rounded up
        ((1_048_576, 1_048_576), (10, 10), 1369),
    ],
)
def test_images_of_extreme_shape_have_more_tokens_than_max_pixels(bounds, size, tokens):
    form = replace(QWEN25, min_pixels=bounds[0], max_pixels=bounds[1])
    assert form.num_tokens(*size) == tokens <= form.max_tokens
    assert form.max_tokens == (1784 if size == (10, 10) else tokens)


def test_all_squares_have_as_many_tokens():
    assert GEMMA3.max_tokens == 256


def test_a_digest_is_of_the_pixels_and_their_shape():
    pixels = noise(56, 112)
    first = Picture(pixels, QWEN25).digest
    assert first == Picture(pixels.copy(), QWEN25).digest == decode(file(Image.fromarray(pixels)), QWEN25).digest
    changed = pixels.copy()
    changed[3, 4, 1] ^= 1
    assert len({first, Picture(changed, QWEN25).digest, Picture(pixels.reshape(112, 56, 3), QWEN25).digest}) == 3


PIXELS = noise(64, 128)
RGB = Image.fromarray(PIXELS)


@pytest.mark.parametrize("kind", [kind for kind in FILE_KINDS if kind not in ("JPEG", "GIF")])
def test_each_kind_of_file_without_loss_gives_the_same_picture(kind):
    how = {"lossless": True} if kind == "WEBP" else {}
    assert decode(file(RGB, kind, **how), QWEN3).digest == decode(file(RGB), QWEN3).digest


STORED = {
    1: PIXELS, 2: PIXELS[:, ::-1], 3: PIXELS[::-1, ::-1], 4: PIXELS[::-1], 5: PIXELS.swapaxes(0, 1),
    6: PIXELS[:, ::-1].swapaxes(0, 1), 7: PIXELS[::-1, ::-1].swapaxes(0, 1), 8: PIXELS[::-1].swapaxes(0, 1),
}  # fmt: skip
"""What a camera writes, by EXIF's orientation: where its first row and column are in the picture."""


@pytest.mark.parametrize("orientation", STORED)
def test_a_turned_photo_is_put_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file(Image.fromarray(STORED[orientation]), exif=exif)
    assert decode(data, QWEN3).digest == decode(file(RGB), QWEN3).digest
    assert source_size(data) == (64, 128)


GREY = Image.fromarray(PIXELS[:, :, 0])


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (Image.fromarray(noise(64, 128, 4)), Image.fromarray(noise(64, 128, 4)[:, :, :3])),
        (GREY, Image.merge("RGB", [GREY] * 3)),
        (Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 256 + 7), Image.merge("RGB", [GREY] * 3)),
        (RGB.quantize(64), RGB.quantize(64).convert("RGB")),
        (GREY.convert("1"), GREY.convert("1").convert("RGB")),
        (Image.merge("LA", [GREY, GREY]), Image.merge("RGB", [GREY] * 3)),
    ],
    ids=["RGBA", "grey", "16 bit", "palette", "1 bit", "grey with alpha"],
)
def test_other_modes_become_rgb(other, same):
    assert decode(file(other), QWEN3).digest == decode(file(same), QWEN3).digest


def test_a_palette_with_transparency_and_cmyk_are_read():
    palette = RGB.quantize(64)
    seen = decode(file(palette, transparency=bytes(range(64))), QWEN3).digest
    assert seen == decode(file(palette), QWEN3).digest
    ink = RGB.convert("CMYK")
    assert decode(file(ink, "TIFF"), QWEN3).digest == decode(file(ink.convert("RGB")), QWEN3).digest
    film = file(RGB, "GIF", save_all=True, append_images=[Image.fromarray(255 - PIXELS)])
    assert decode(film, QWEN3).pixels.shape == (192, 384, 3), "the first frame"


def claims(height: int, width: int) -> bytes:
    """A PNG whose header says this size."""
    import struct
    import zlib

    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + file(RGB)[33:]


WRONG = {
    "empty": (b"", "is empty"),
    "text": (b"<html>not found</html>", "no image: the file begins with b'<html>no'"),
    "another kind of file": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image"),
    "truncated": (file(RGB)[:3000], "a PNG file that cannot be decoded"),
    "a truncated photo": (file(RGB, "JPEG")[:900], "a JPEG file that cannot be decoded: .*truncated"),
    "only a header": (file(RGB)[:20], "image"),
    "huge": (claims(60_000, 60_000), "pixels"),
    "large": (claims(10_000, 10_000), "10000 x 10000 pixels; 89,478,485 are read at most"),
    "long": (file(Image.fromarray(noise(1, 201))), "201 x 1 pixels; one side may be 200 times"),
    "32 bits": (file(Image.fromarray(noise(64, 64)[:, :, 0].astype(np.float32)), "TIFF"), "32 bits a pixel"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_cannot_be_shown_is_refused_in_one_line(case):
    data, says = WRONG[case]
    with pytest.raises(ImageError, match=says) as error:
        decode(data, QWEN25)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


SMALL = Image.fromarray(PIXELS[:32, :32])


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of corrupt EXIF data and truncated files
@pytest.mark.parametrize("kind", FILE_KINDS)
def test_broken_bytes_give_a_picture_or_an_image_error(kind):
    """Whatever was done to a file: cut anywhere, up to four bytes changed, most of them in its first 400."""
    random, sound, small = np.random.default_rng(0), file(SMALL, kind), replace(QWEN3, min_pixels=1)
    pictures = 0
    for _ in range(300):
        broken = bytearray(sound if random.random() < 0.7 else sound[: random.integers(len(sound))])
        for _ in range(random.integers(5)):
            place = random.integers(min(len(sound), 400 if random.random() < 0.8 else len(sound)))
            broken[place : place + 1] = bytes([random.integers(256)])
        try:
            source_size(bytes(broken))
            decode(bytes(broken), small)
            pictures += 1
        except ImageError as error:
            assert "\n" not in str(error)
    assert 0 < pictures < 300


VISION = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
TOKENS = {"image_token_id": 5, "vision_start_token_id": 3, "vision_end_token_id": 4}
CONFIG = {"model_type": "qwen2_5_vl", "vision_config": VISION, **TOKENS}
PROCESSOR = {"image_mean": CLIP[0], "image_std": CLIP[1], "min_pixels": 3136, "max_pixels": 12_845_056}


def model(folder: Path, config: dict, **files: dict) -> str:
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def test_the_format_is_that_of_the_model_with_the_bounds_of_the_data(tmp_path):
    path = model(tmp_path, CONFIG, preprocessor_config=PROCESSOR)
    assert ImageFormat.of(path, DATA) == QWEN25
    bounds = DataConfig(train=DATA.train, min_pixels=7840, max_pixels=None)
    found = ImageFormat.of(path, bounds)
    assert (found.min_pixels, found.max_pixels) == (7840, 12_845_056)
    size = {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    new = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **size}
    qwen3 = CONFIG | {"model_type": "qwen3_vl", "vision_config": VISION | {"patch_size": 16}}
    (tmp_path / "preprocessor_config.json").unlink()
    assert ImageFormat.of(model(tmp_path, qwen3, processor_config={"image_processor": new}), DATA) == QWEN3


SQUARES: dict[str, Any] = {
    "model_type": "gemma3",
    "vision_config": {"image_size": 896, "patch_size": 14, "vision_use_head": False},
    "text_config": {"sliding_window": 1024},
    "mm_tokens_per_image": 256,
    "image_token_index": 5,
    "boi_token_index": 3,
    "eoi_token_index": 4,
}
SQUARE = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 896, "width": 896}}


def test_images_of_one_size_are_those_of_the_model(tmp_path):
    path = model(tmp_path, SQUARES, preprocessor_config=SQUARE | {"do_pan_and_scan": None})
    assert ImageFormat.of(path, DATA) == GEMMA3
    whole = DATA.model_copy(update={"max_pixels": None})
    assert ImageFormat.of(path, whole) == GEMMA3


@pytest.mark.parametrize(
    ("config", "processor", "data", "says"),
    [
        ({}, {"do_pan_and_scan": True}, {}, "do_pan_and_scan, which cuts images into several, is not trained"),
        ({}, {"size": {"height": 448, "width": 896}}, {}, "makes images of 896 x 448 pixels, its tower takes 896 x"),
        ({"text_config": {"sliding_window": 128}}, {}, {}, "256 tokens, more than the sliding window of 128"),
        ({"mm_tokens_per_image": 255}, {}, {}, "896 x 896 pixels is not 255 squares of whole patches"),
        ({"vision_config": {"image_size": 896, "patch_size": 14}}, {}, {}, "has a head that images do not pass"),
        ({}, {}, {"max_pixels": 262_144}, "data.max_pixels: 262144: .* sees every image in 802816 pixels; set both to"),
        ({}, {}, {"min_pixels": 802_817}, "data.min_pixels: 802817"),
    ],
)
def test_images_of_one_size_that_servers_would_see_otherwise_are_refused(tmp_path, config, processor, data, says):
    path = model(tmp_path, SQUARES | config, preprocessor_config=SQUARE | processor)
    with pytest.raises(ConfigError, match=says) as error:
        ImageFormat.of(path, DATA.model_copy(update=data))
    assert "\n" not in str(error.value)


def test_a_text_model_has_no_format(tmp_path):
    assert ImageFormat.of(model(tmp_path, {"model_type": "qwen2"}), DATA) is None


def test_a_model_that_reads_images_is_trained_on_text_alone_if_the_run_says_so(tmp_path):
    path = model(tmp_path, CONFIG)
    assert ImageFormat.of(path, DATA, text_alone=True) is None
    with pytest.raises(ConfigError, match=r"model.freeze: \[vision\]: .* \(qwen2_5_vl\) is trained on text alone"):
        ImageFormat.of(path, DATA, ("vision",), text_alone=True)
    with pytest.raises(ConfigError, match=r"model.text_alone: true: .* is no vision-language model; remove the key"):
        ImageFormat.of(model(tmp_path, {"model_type": "qwen2"}), DATA, text_alone=True)


@pytest.mark.parametrize(
    ("config", "processor", "says"),
    [
        (CONFIG, {}, "says shortest_edge"),
        ({"model_type": "qwen2_5_vl", "vision_config": VISION}, PROCESSOR, "says image_token_id"),
        (CONFIG, PROCESSOR | {"min_pixels": 2_000_000}, "data.min_pixels: 2000000 of the model itself is more than"),
    ],
)
def test_a_model_that_cannot_be_shown_images_is_refused_by_name(tmp_path, config, processor, says):
    with pytest.raises(ConfigError, match=says) as error:
        ImageFormat.of(model(tmp_path, config, preprocessor_config=processor), DATA)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no config"):
        ImageFormat.of(str(tmp_path), DATA)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        ImageFormat.of(str(tmp_path), DATA)
