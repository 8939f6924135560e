"""Checks that teachers have the policy's vocabulary: else their log-probabilities are of other tokens."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from configs.schema import Config
from configs.teachers import key_of, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def other_vocabularies(config: Config, own: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Yield a line for each teacher whose tokenizer is not the policy's `own`, or cannot be loaded."""
    from transformers import AutoTokenizer  # takes seconds

    for source, teacher in config.teacher.teachers.items():
        key, name = key_of(config.teacher, source), tokenizer_of(teacher) or ""
        key = f"{key}.{'tokenizer' if teacher.tokenizer else 'model'}"
        try:
            theirs = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            yield f"{key}: {name}: no tokenizer can be loaded: {str(error).strip().splitlines()[0]}"
            continue
        if difference := first_difference(own.get_vocab(), theirs.get_vocab()):
            problem = f"its vocabulary is not that of model.path {config.model.path}: {difference}"
            yield f"{key}: {name}: {problem}; name a teacher with the policy's tokenizer"


def first_difference(own: dict[str, int], theirs: dict[str, int]) -> str:
    """Describe the first token that differs; "" if none does."""
    if own == theirs:
        return ""
    by_id, other = ({number: token for token, number in each.items()} for each in (own, theirs))
    number = min(n for n in by_id.keys() | other.keys() if by_id.get(n) != other.get(n))
    shown = [repr(each[number]) if number in each else "no token" for each in (by_id, other)]
    return f"token {number} is {shown[0]} there and {shown[1]} here ({len(own):,} and {len(theirs):,} tokens)"
