"""A model made on the spot and taught answers, such as a character tokenizer and a Qwen2 with 212 thousand parameters.

Used by the `make_model.py` of examples, which say what answers: reinforcement learning is to begin with a model that
has the form of an answer and errs on purpose. Writes random weights, and trains them with `python -m learner sft`.
Takes a minute or two on one thread; the same arguments give the same weights. The demonstrations, the random model and
the run stay in `warm_start/`.
"""

import string
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from transformers.utils.logging import disable_progress_bar

from examples.fine_tuning import Row, Sections, begun, first_shown, tune
from examples.kept import is_kept, record_made

END, PAD = "<|endoftext|>", "<|pad|>"
SPELLED = "ĠĊ"
"""Space and newline as byte-level BPE writes them."""
VOCABULARY = 112
BATCH, LR = 64, 4e-3
TAUGHT_BY = "python -m learner sft"
"""Part of the record: an earlier release taught with a loop of its own, and got other weights by the same arguments."""


def character_tokenizer(tags: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and per tag, and the chat template.

    It is byte-level BPE without merges because transformers 5 rebuilds the tokenizer of every Qwen2 folder as that.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    characters = [c for c in alphabet if c in string.printable or c in SPELLED]
    vocabulary = {token: index for index, token in enumerate([END, PAD, *tags, *characters])}
    while len(vocabulary) < VOCABULARY:
        vocabulary[f"<|unused{len(vocabulary)}|>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_network(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Qwen2 with 3 layers of width 64, float32. Heads are 32 wide, the narrowest that vLLM's CPU attention takes."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def write_random(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> int:
    """Write the network with random weights as a Hugging Face folder; returns the number of its parameters."""
    disable_progress_bar()
    set_seed(seed)
    network = make_network(tokenizer)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(network.num_parameters())


def run_file(model: Path, seed: int, steps: int, plain: bool = False) -> Sections:
    """The run file of the warm start, without its rows, for one thread: the learning rate falls linearly to a tenth."""
    learner = {"device": "cpu", "threads": 1, "lr": LR, "schedule": "linear", "warmup_versions": 0}
    learner |= {"activation_checkpointing": "none", "checkpoint_every": steps}
    return {
        "run": {"seed": seed, "versions": steps},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"chat_template": "none"} if plain else {},
        "sft": {"rows": BATCH},
        "learner": learner,
    }


def random_model(out: Path) -> Path:
    """The folder of the model that is taught."""
    return out / "warm_start" / "random"


def make_model(
    out: Path, asked: dict[str, Any], tokenizer: PreTrainedTokenizerFast, rows: Iterator[Row], plain: bool = False
) -> str:
    """`teach` the network of `make_network`. `asked` has `seed` and `steps`. `plain`: the chat template adds nothing to
    a prompt; rows are read several times as fast without it."""
    seed, steps = asked["seed"], asked["steps"]
    sections = run_file(random_model(out), seed, steps, plain)
    return teach(out, asked, lambda folder: write_random(folder, tokenizer, seed), sections, rows)


def teach(
    out: Path,
    asked: dict[str, Any],
    write: Callable[[Path], int],
    sections: Sections,
    rows: Iterator[Row] | None = None,
) -> str:
    """Write a Hugging Face folder unless one made with the same arguments exists; returns one line for people. `asked`:
    the arguments. `write` writes random weights and returns the number of parameters. `rows`: endless demonstrations;
    None: `sections`, the run file, name them."""
    made, folder, steps = out / "warm_start.json", out / "warm_start", sections["run"]["versions"]
    asked = asked | {"taught by": TAUGHT_BY, "learner": sections["learner"]}
    if rows is not None:
        asked["shown"], rows = first_shown(rows)
    if is_kept(made, asked, out / "model.safetensors"):
        return f"{out}: model kept, made before with the same arguments"
    began = time.monotonic()
    with begun(folder):
        made.unlink(missing_ok=True)
        count = write(random_model(out))
        loss = tune(out, folder, rows, sections)
        record_made(made, asked)
    seconds = time.monotonic() - began
    return f"{out}: {count:,} parameters, loss {loss:.3f} after {steps} steps, {seconds:.0f} s"
