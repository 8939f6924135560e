"""Random vision-language models, those of the vision quickstart; and pictures.

tiny_vlm(folder, "qwen3_vl")                      see examples/shapes/tiny_vlm.py
picture(48, 80), encoded(picture(48, 80))         an RGB image of noise, and its PNG
"""

import io

import numpy as np
from PIL import Image

from examples.shapes.tiny_vlm import KINDS, PATCH, tiny_tokenizer, tiny_vlm

__all__ = ["KINDS", "PATCH", "encoded", "picture", "tiny_tokenizer", "tiny_vlm"]


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """An RGB image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    """The bytes of the image's file."""
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()
