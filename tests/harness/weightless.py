"""Weights for a model's folder of which a test needs config and tokenizer only."""

from pathlib import Path

from safetensors.numpy import save_file


def add_weights(folder: Path) -> Path:
    """Put a safetensors file without tensors into `folder`, which the checks take for whole. Returns the folder."""
    save_file({}, folder / "model.safetensors")
    return folder
