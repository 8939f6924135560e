"""The probe's tokens: short enough for every server, digits if the tokenizer has them."""

from pathlib import Path

from transformers import AutoTokenizer

from examples.countdown.make_model import make_tokenizer
from learner.weights.probe import PROBE_TOKENS, tokens_of


class NoDigits:
    """A tokenizer without digits."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [3] * len(text)

    def __len__(self) -> int:
        return 12


def test_the_probe_leaves_room_for_the_token_that_a_server_samples_after_it(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokens_of(tokenizer, 10_000)) == PROBE_TOKENS
    assert tokens_of(tokenizer, 30) == tokens_of(tokenizer, 10_000)[:30]
    assert tokenizer.decode(tokens_of(tokenizer, 7)) == "1, 2, 3"


def test_a_tokenizer_without_digits_gets_the_same_random_tokens_on_every_rank() -> None:
    tokens = tokens_of(NoDigits(), 40)
    assert tokens == tokens_of(NoDigits(), 40) and len(tokens) == 40
    assert set(tokens) <= set(range(12)) and len(set(tokens)) > 6
