"""The weights that a run starts from: `python -m benchmarks.runs.models SHAPE FOLDER MEAN` writes them.

Random, of full size, and with a known length of answers: at each token an answer ends with probability 1 / MEAN, never
for 0 (`benchmarks/weights/known.py`). Those of a model that sees stay random in all parts, so that the probe's picture
tells right weights from wrong ones: its answers run to their full length, because the token that ends one is as likely
as each of the tens of thousands of others. So do those of a mixture of experts (`mixture_files.py`). On a GPU if there
is one; takes seconds for 1.5B, most of them for the disk.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from benchmarks.runs.mixture_files import write_mixture
from benchmarks.weights.family_shapes import FAMILIES
from benchmarks.weights.known import end_answers
from benchmarks.weights.seeing import SEEING
from benchmarks.weights.shapes import END, EXPERTS, folder_of
from configs.inner_command import inner_words
from learner.model.loading import auto_class


def weights_of(shape: str, work: Path, mean: float) -> Path:
    """A model's folder with weights; one that is there already is kept."""
    folder = folder_of(shape, work / f"mean-{mean:g}")
    done = folder / "complete"
    if not done.exists():
        if shape in EXPERTS:
            write_mixture(shape, folder)
            done.touch()
            return folder
        config = AutoConfig.from_pretrained(folder)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            torch.manual_seed(0)
            model = auto_class(config).from_config(config, dtype=torch.bfloat16)
        for name, weight in model.named_parameters():
            if name.endswith("mm_input_projection_weight"):  # zeros at first, with which images change nothing
                torch.nn.init.normal_(weight, std=0.02)
        if shape not in (*SEEING, *FAMILIES):
            end_answers(model.named_parameters(), END, config.vocab_size, mean)
        model.save_pretrained(folder)
        done.touch()
    return folder


if __name__ == "__main__":
    inner_words("SHAPE", "FOLDER", "MEAN")
    print(weights_of(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
