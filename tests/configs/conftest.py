"""What the tests of the run file share: a config from overrides, and a small model folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder of 1,100 parameters in two files, 6 heads and 512 positions."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 6, "max_position_embeddings": 512}))
    save_file({"a": np.zeros((10, 100), np.float16)}, folder / "model-1.safetensors")
    save_file({"b": np.zeros(100, np.float32)}, folder / "model-2.safetensors")
    return folder
