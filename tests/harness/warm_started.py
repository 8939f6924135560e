"""What tests of the examples' warm starts share: how `python -m learner sft` reads their demonstrations."""

from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerFast

from configs.checks import check_sft
from configs.load import load
from examples import warm_start
from learner.sft.answers import AnswerReader


def reader_of_warm_start(folder: Path, tokenizer: PreTrainedTokenizerFast, plain: bool) -> AnswerReader:
    """The reader of a warm start's demonstrations, by the run file that the examples write."""
    model, demonstrations, file = folder / "random", folder / "demonstrations.jsonl", folder / "lesson.yaml"
    warm_start.write_random(model, tokenizer, seed=0)
    demonstrations.touch()
    sections = warm_start.run_file(model, seed=0, steps=1, plain=plain)
    sections["data"]["train"] = str(demonstrations)
    file.write_text(yaml.safe_dump(sections))
    config = load([str(file)])
    check_sft(config)
    return AnswerReader(tokenizer, config)
