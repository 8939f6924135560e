"""Tasks by name and from users' files; prompts from rows."""

import codecs
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from configs.load import ConfigError, load
from configs.schema import Config
from examples.countdown.make_model import make_tokenizer
from rollout.episodes.prompts import Prompts, load_tokenizer
from rollout.errors import PromptError
from rollout.rewards.models.http_model import AnswerTemplate
from rollout.tasks import convention, load_task
from rollout.tasks.trajectory import single_turn

CHAT = [{"role": "user", "content": "8 6 4=2\n"}]


def config(*overrides: str, folder: Path | None = None) -> Config:
    path = Path(__file__).parents[2] / "examples/countdown/quickstart.yaml"
    return load([str(path), *([f"--model.path={folder}"] if folder else []), *overrides])


def prompts(*overrides: str) -> Prompts:
    return Prompts(make_tokenizer(), config(*overrides))


def test_tasks_have_names_or_files(tmp_path: Path):
    assert load_task("single_turn") is single_turn
    (tmp_path / "tools.py").write_text("async def play(problem, generate): ...\n")
    assert load_task(f"{tmp_path}/tools.py:play").__name__ == "play"
    with pytest.raises(ValueError, match=r"rollout.task: .*/tools.py has no function 'turn'"):
        load_task(f"{tmp_path}/tools.py:turn")


def test_a_user_s_task_imports_from_one_place(tmp_path: Path):
    """The import path that the pages give users: it stays."""
    (tmp_path / "tools.py").write_text(
        "from rollout.tasks import Completion, EpisodeError, Generate, Problem, Trajectory\n"
        "async def play(problem: Problem, generate: Generate) -> Trajectory: ...\n"
    )
    assert load_task(f"{tmp_path}/tools.py:play").__name__ == "play"


def test_chat_rows_become_tokens():
    made = prompts()
    tokens = made.tokens({"prompt": CHAT})
    assert len(tokens) == 8 and made.text(tokens) == "8 6 4=2\n"


def test_text_rows_are_wrapped_by_template_and_system_prompt(tmp_path: Path):
    template = tmp_path / "prompt.jinja"
    template.write_text("{{ content | trim }} = ?\n")
    made = prompts(f"--data.format_prompt={template}", "--data.system_prompt=Count.", "--data.max_prompt_tokens=30")
    assert made.messages({"problem": "  1+1 ", "answer": "2"}) == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "1+1 = ?"},
    ]
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "1"}]
    assert made.messages({"prompt": own})[0]["content"] == "Mine."
    assert own[1]["content"] == "1"


def test_prompts_beyond_the_limit_are_permanent_failures_of_one_reason():
    with pytest.raises(PromptError, match=r"prompt longer than data.max_prompt_tokens 12\n") as caught:
        prompts().tokens({"prompt": [{"role": "user", "content": "1" * 13}]})
    assert caught.value.permanent and str(caught.value) == "prompt longer than data.max_prompt_tokens 12"


class EndingTokenizer:
    """Puts its end after every text, as some do."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = self.tokenizer.encode(text, add_special_tokens=False)
        return [*found, self.tokenizer.eos_token_id] if add_special_tokens else found


def test_a_plain_prompt_stays_open():
    made = prompts("--data.chat_template=none", "--sampling.stop=[]")
    closing = Prompts(EndingTokenizer(made.tokenizer), config("--data.chat_template=none", "--sampling.stop=[]"))
    row = {"problem": "8 6 4"}
    assert closing.tokens(row) == made.tokens(row) and closing.tokens(row)[-1] not in closing.ends
    assert closing.stops == closing.ends


def test_a_task_that_yields_or_has_unknown_parameters_is_refused():
    class Plays:
        async def __call__(self, problem, generate):
            yield problem

    with pytest.raises(ValueError, match=r"^rollout.task: mine yields; let it return one Trajectory, or its score$"):
        convention("mine", Plays())
    with pytest.raises(ValueError, match=r"^rollout.task: mine: its parameters are unknown: .*; call it in a `def`$"):
        convention("mine", max)


def test_a_row_that_was_not_made_says_why():
    with pytest.raises(PromptError, match="list_functions cannot make entry 7"):
        prompts().tokens({"data_source": "reasoning_gym/x", "unmade": "list_functions cannot make entry 7"})


def test_a_column_of_a_file_may_have_the_name_of_our_mark_of_such_a_row():
    assert prompts().tokens({"problem": "8 6 4", "unmade": True}) == prompts().tokens({"problem": "8 6 4"})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "?"}, "neither prompt nor problem, but question"),
        ({"problem": "?", "images": [1]}, "images"),
        ({"prompt": ["?"]}, r"message 0 is '\?'; role and content are needed"),
    ],
)
def test_rows_that_cannot_be_sampled_are_permanent_failures(row: dict, words: str):
    with pytest.raises(PromptError, match=words) as caught:
        prompts().tokens(row)
    assert caught.value.permanent and caught.value.kind == "prompt"


def test_stops_are_single_tokens_and_the_end_is_one_of_them():
    tokenizer = make_tokenizer()
    assert prompts().stops == [tokenizer.convert_tokens_to_ids("</answer>"), tokenizer.eos_token_id]
    with pytest.raises(
        ValueError, match=r"sampling.stop: 'the end' is 7 tokens of this tokenizer; a stop is a single one"
    ):
        prompts("--sampling.stop=[the end]")


def test_the_model_s_generation_config_may_name_more_ends(tmp_path: Path):
    tokenizer = make_tokenizer()
    GenerationConfig(eos_token_id=[5, 7]).save_pretrained(tmp_path)
    assert Prompts(tokenizer, config("--sampling.stop=[]", folder=tmp_path)).stops == [tokenizer.eos_token_id, 5, 7]


def test_all_stops_of_several_tokens_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        prompts("--sampling.stop=[ab, x, cde]")
    assert [line.partition(" tokens")[0] for line in caught.value.problems] == [
        "sampling.stop: 'ab' is 2",
        "sampling.stop: 'cde' is 3",
    ]


def test_a_base_model_reads_plain_text_or_the_run_s_own_chat_template(tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    plain = Prompts(tokenizer, config("--data.chat_template=none", "--data.system_prompt=Add."))
    assert plain.text(plain.tokens({"problem": "1+1"})) == "Add.\n\n1+1"
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}?")
    made = Prompts(tokenizer, config(f"--data.chat_template={tmp_path}/chat.jinja", "--data.max_prompt_tokens=11"))
    assert made.text(made.tokens({"problem": "1+1"})) == "<user>1+1?"
    with pytest.raises(PromptError, match="message 0, of role 'user', has the content None; a text or a list"):
        plain.tokens({"prompt": [{"role": "user", "content": None}]})


def test_a_byte_order_mark_of_a_template_file_is_no_part_of_the_prompt(tmp_path: Path):
    texts = {"chat": "{{ messages[0].content }}=", "prompt": "{{ content }}+1", "judge": "{{ answer }}+1"}
    for name, text in texts.items():
        (tmp_path / f"{name}.jinja").write_bytes(codecs.BOM_UTF8 + text.encode())
    given = [f"--data.chat_template={tmp_path}/chat.jinja", f"--data.format_prompt={tmp_path}/prompt.jinja"]
    made = Prompts(make_tokenizer(), config(*given))
    assert made.shown(made.tokens({"problem": "1"})) == "1+1="
    assert AnswerTemplate(str(tmp_path / "judge.jinja")).render("1", "", {}) == "1+1"


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"model.path: the tokenizer in .* has no chat template"):
        Prompts(tokenizer, config())
    with pytest.raises(ValueError, match=r"model.path: no tokenizer can be loaded from"):
        load_tokenizer(config(folder=tmp_path))


def test_the_chat_template_s_own_refusal_is_a_permanent_failure():
    made = prompts()
    made.tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(PromptError, match=r"the chat template refuses the row: no system messages") as caught:
        made.tokens({"prompt": CHAT})
    assert caught.value.permanent
