"""Templates of users' files and models' folders run in a sandbox, in a process that is ended at its limits."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from configs.load import load
from rollout.chat.template import ChatTemplate
from rollout.episodes.prompts import Prompts
from rollout.errors import ChatRefused, PromptError, RewardError
from rollout.rewards.models.http_model import AnswerTemplate
from rollout.templates.renderer import MOST_CHARACTERS, ChatTexts, Renderer, RenderError
from tests.rollout.chat.chat_templates import TEMPLATES, chat_tokenizer
from tests.rollout.episodes.test_row_messages import NEEDED

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(processor_s=0.3)


ESCAPES = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a filter": "{{ ''|attr('__class__') }}",
    "a format": "{{ '{0.__class__}'.format('') }}",
    "a global": "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
    "the environment": "{{ self.__init__.__globals__ }}",
    "a generator": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}{{ os }}",
}


@pytest.mark.parametrize("kind", ["chat", "text", "file"])
@pytest.mark.parametrize("way", ESCAPES)
def test_no_template_reaches_python(
    kind: str, way: str, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        found = renderer.render(kind, ESCAPES[way], {"messages": ["a"]})
    except RenderError:
        found = ""
    assert not any(word in found for word in ("class", "root:", "function", "module")) and not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        (LOOP, "took more than 0.3 s of processor time"),
        (
            "{% macro f() %}{{ LOOP }}{% endmacro %}{% set x = 3 ** 99999999 %}",
            "took more than 0.3 s of processor time",
        ),
        ("{{ 'a' * 99999999999 }}", "needed more than 1,024 MiB of memory"),
        ("{{ 'a'|center(99999999999) }}", "needed more than 1,024 MiB of memory"),
        ("{{ 'a' * 9999999 }}", f"wrote more than {MOST_CHARACTERS:,} characters"),
        ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", f"wrote more than {MOST_CHARACTERS:,} characters"),
    ],
)
def test_a_template_that_exceeds_a_limit_is_ended_and_the_next_one_rendered(
    source: str, limit: str, renderer: Renderer
) -> None:
    with pytest.raises(RenderError) as caught:
        renderer.render("chat", source, {})
    assert caught.value.about("the row", "the chat template", "model.path m") == (
        f"the chat template (model.path m) {limit} for the row"
    )
    assert renderer.render("chat", "{{ 1 + 1 }}", {}) == "2"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_template_process_that_is_killed_or_stopped_is_replaced_and_no_template_refused(number: int) -> None:
    renderer = Renderer()
    renderer.check("chat", "{{ 1 }}")
    assert renderer._process is not None
    if number == signal.SIGSTOP:
        renderer._process._socket.settimeout(0.2)
    os.kill(renderer._process._process.pid, number)
    assert renderer.render("chat", "{{ 1 }}", {}) == "1"


def test_a_template_process_outlives_a_sigterm_to_all_processes_of_a_job() -> None:
    renderer = Renderer()
    renderer.check("chat", "{{ 1 }}")
    assert renderer._process is not None
    before = renderer._process
    os.kill(before._process.pid, signal.SIGTERM)
    assert renderer.render("chat", "{{ 1 }}", {}) == "1" and renderer._process is before


@pytest.mark.parametrize(
    ("limits", "words"),
    [({"wall_s": 0.001}, "gave no answer within 0.001 s"), ({"memory": 2**20}, "ended its process with exit code 1")],
)
def test_a_template_without_a_process_that_answers_is_refused(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(RenderError, match=words):
        Renderer(**limits).check("chat", "{{ 1 }}")


def test_the_signal_that_ended_a_process_is_named() -> None:
    with pytest.raises(RenderError, match="ended its process by SIGSEGV"):
        Renderer()._text(["ended", signal.SIGSEGV])


def test_the_process_ends_with_its_renderer() -> None:
    renderer = Renderer()
    renderer.check("chat", "{{ 1 }}")
    assert renderer._process is not None
    process = renderer._process._process
    del renderer
    assert process.poll() == -signal.SIGKILL


CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "A <b> & 'c' é \n"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "<think>t</think> a "}]},
    {"messages": [{"role": "user", "content": "u"}], "tools": [{"type": "function", "function": {"name": "f<é>"}}]},
]
OWN = {
    "the tag generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages|tojson }}{{ tools|tojson(indent=2) }}",
    "the date": "{{ strftime_now('%Y') }}",
    "white space": "  {% if true %}\n  a\n  {% endif %}\n{# c #}\nb\n",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ enable_thinking }}",
}


def both(tokenizer: PreTrainedTokenizerFast, chat: dict[str, Any], header: bool, continued: bool) -> Iterator[str]:
    """The text by transformers and by ours, or the type of the error."""
    options: dict[str, Any] = {"enable_thinking": False}
    given = dict(add_generation_prompt=header, continue_final_message=continued, tokenize=False, **options)
    try:
        yield str(tokenizer.apply_chat_template(chat["messages"], tools=chat.get("tools"), **given))
    except Exception as error:
        yield "refused" if type(error).__name__ in ("TemplateError", "ValueError") else type(error).__name__
    try:
        made = ChatTexts(tokenizer, RENDERER)
        yield made.render(chat["messages"], header, chat.get("tools"), options, continued)
    except (RenderError, ValueError) as error:
        yield "refused" if getattr(error, "kind", "refused") == "refused" else str(error).partition(":")[0]


def test_templates_write_the_time_that_they_are_given() -> None:
    renderer = Renderer(now=86_400)
    assert renderer.render("chat", "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}", {}) == "1970-01-02 00:00:00"
    renderer.close()


RENDERER = Renderer()


@pytest.mark.parametrize("number", range(len(CHATS)))
@pytest.mark.parametrize("name", [*TEMPLATES, *OWN])
def test_chats_are_rendered_as_transformers_renders_them(name: str, number: int) -> None:
    tokenizer = chat_tokenizer(name if name in TEMPLATES else "chatml")
    if name in OWN:
        tokenizer.chat_template = OWN[name]
    ways = [(True, False), (False, False), *([(False, True)] if "content" in str(tokenizer.chat_template) else [])]
    for header, continued in ways:
        theirs, ours = both(tokenizer, CHATS[number], header, continued)
        assert ours == theirs


def prompts(template: str, tmp_path: Path) -> Prompts:
    (tmp_path / "chat.jinja").write_text(template)
    return Prompts(chat_tokenizer("chatml"), load([*NEEDED, f"--data.chat_template={tmp_path}/chat.jinja"]))


@pytest.mark.long
def test_a_chat_template_that_loops_costs_a_row_and_is_named(tmp_path: Path) -> None:
    made = prompts("{% if messages[0].content == 'bad' %}" + LOOP + "{% endif %}{{ messages[0].content }}", tmp_path)
    where = rf"the chat template \(data.chat_template {tmp_path}/chat.jinja\) took more than 2 s of processor time"
    with pytest.raises(PromptError, match=f"{where} for the row"):
        made.encode({"problem": "bad"})
    assert made.encode({"problem": "good"})
    with pytest.raises(ChatRefused, match=f"messages: {where} for them"):
        ChatTemplate(made).text([{"role": "user", "content": "bad"}], None, True)


def test_a_format_prompt_runs_in_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "form.jinja").write_text("{{ content.__class__ }}")
    made = Prompts(chat_tokenizer("chatml"), load([*NEEDED, f"--data.format_prompt={tmp_path}/form.jinja"]))
    with pytest.raises(PromptError, match=rf"data.format_prompt {tmp_path}/form.jinja refuses the row: access to attr"):
        made.encode({"problem": "2 + 2"})


def test_the_template_of_a_judge_runs_in_the_sandbox() -> None:
    with pytest.raises(RewardError, match="its template refuses the row: access to attribute '__class__'"):
        AnswerTemplate("{{ answer.__class__ }}").render("a", "b", {})
    with pytest.raises(RewardError, match="its template wrote more than 4,194,304 characters for the row"):
        AnswerTemplate("{{ answer * 9999999 }}").render("a", "b", {})
