"""Values from environment variables are written as they were, resolved at each start, and never shown."""

import json
from pathlib import Path

import pytest

from configs.load import ConfigError, dump, load, parse, write
from configs.origins import MASK, comparable, disclosed, is_credential, shared, variables
from configs.plain_text import visible
from configs.resume import changes, fingerprint, settings, written
from configs.schema import Config

SECRET = 'hunter-"two" \\ 4711 é'
NEEDED = ["--data.train=d.jsonl", "--model.path=m"]
JUDGE = {"api_key": "${oc.env:EDGE_KEY}", "headers": {"X-Own": "Bearer ${oc.env:EDGE_KEY}"}, "n": 3}
PLACES = {
    "reward.kwargs": JUDGE,
    "reward.engine": {"hf_token": "${oc.env:EDGE_KEY}"},
    "rollout.engine": {"hf_token": "${oc.env:EDGE_KEY}", "max_model_len": 64},
    "rollout.environment.args": {"deep": [{"key": "${oc.env:EDGE_KEY}"}]},
    "rollout.chat.template_kwargs": {"name": "${oc.env:EDGE_KEY}"},
    "rollout.agent.command": ["agent", "--own=${oc.env:EDGE_KEY}"],
    "data.system_prompt": "You are ${oc.env:EDGE_KEY}.",
    "rollout.chat.public_url": "https://${oc.env:EDGE_KEY_PLAIN}",
    "run.name": "${oc.env:EDGE_KEY_PLAIN}",
}


def config(*words: str, function: str = "judge") -> Config:
    return load([*NEEDED, f"--reward.function={function}", *words])


def everywhere(value: Config) -> str:
    """What is written of a config: the file, the ledger's settings, the page's."""
    return "\n".join(json.dumps(form, ensure_ascii=False) for form in (dump(value), settings(value), disclosed(value)))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_KEY", SECRET)
    monkeypatch.setenv("EDGE_KEY_PLAIN", "plain-secret-4711")


@pytest.mark.parametrize("place", PLACES)
def test_no_value_of_a_variable_is_written(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(f"--{place}={json.dumps(PLACES[place])}")
    text = everywhere(made)
    assert "4711" not in text and text.count("oc.env:EDGE_KEY") >= 3
    write(made, tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert load([str(tmp_path / "config.yaml")]) == parse(dump(made)) == made, "each process reads the same"
    assert "4711" in made.model_dump_json()


def test_a_rotated_key_is_no_change_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"--reward.kwargs={json.dumps(JUDGE)}", '--rollout.engine={hf_token: "${oc.env:EDGE_KEY}"}']
    before = config(*words)
    monkeypatch.setenv("EDGE_KEY", "another-key-0815")
    after = config(*words)
    assert after.reward.kwargs["api_key"] == "another-key-0815" and fingerprint(before) == fingerprint(after)
    assert changes(settings(before), after) == []
    with pytest.raises(ConfigError, match=r"reward.kwargs: .* it may not change"):
        changes(settings(before), config(f"--reward.kwargs={json.dumps(JUDGE | {'n': 4})}", words[1]))


def test_a_ledger_of_an_older_release_that_holds_the_key_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(f"--reward.kwargs={json.dumps(JUDGE)}")
    old = settings(made) | {"reward.kwargs": made.reward.kwargs, "model.path": "m"}
    monkeypatch.setenv("EDGE_KEY", "another-key-0815")
    assert changes(old, config(f"--reward.kwargs={json.dumps(JUDGE)}")) == []


def test_another_model_from_a_variable_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is no credential: its digest stands behind it, in ledger and fingerprint."""
    monkeypatch.setenv("EDGE_MODEL", "models/one")
    words = ["--model.path=${oc.env:EDGE_MODEL}", "--batch.groups=${oc.env:EDGE_GROUPS,4}"]
    before = config(*words)
    assert changes(settings(before) | {"model.path": "models/one", "batch.groups": 4}, before) == []
    assert changes(settings(before), config("--model.path=models/one", "--batch.groups=4")) == []
    monkeypatch.setenv("EDGE_MODEL", "models/two")
    after = config(*words)
    assert fingerprint(after) != fingerprint(before) and before.batch.groups == 4
    with pytest.raises(ConfigError, match=r"model.path: .*oc.env:EDGE_MODEL.* it may not change"):
        changes(settings(before), after)


def test_a_missing_variable_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(config(f"--reward.kwargs={json.dumps(JUDGE)}"), tmp_path / "config.yaml")
    monkeypatch.delenv("EDGE_KEY")
    with pytest.raises(ConfigError) as error:
        load([str(tmp_path / "config.yaml")])
    (line,) = error.value.problems
    assert line.startswith("reward.kwargs.api_key: Environment variable 'EDGE_KEY' not found (")
    assert line.endswith("; export EDGE_KEY where the run is started")


def test_who_only_looks_at_a_run_needs_no_credential(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = [f"--reward.kwargs={json.dumps(JUDGE)}", "--batch.groups=${oc.env:EDGE_GROUPS}"]
    monkeypatch.setenv("EDGE_GROUPS", "4")
    made = config(*words)
    write(made, tmp_path / "config.yaml")
    monkeypatch.delenv("EDGE_KEY")
    seen = load([str(tmp_path / "config.yaml")], lenient=True)
    assert seen.reward.kwargs["api_key"] == MASK and disclosed(seen) == disclosed(made)
    assert fingerprint(seen) == fingerprint(made) and written(tmp_path) == settings(made)
    monkeypatch.delenv("EDGE_GROUPS")
    with pytest.raises(ConfigError, match=r"^batch.groups: Environment variable 'EDGE_GROUPS' not found \("):
        load([str(tmp_path / "config.yaml")], lenient=True)


@pytest.mark.parametrize(("mask", "mode"), [("077", 0o600), ("027", 0o640)])
def test_a_config_file_that_holds_a_credential_is_the_user_s_only(
    mask: str, mode: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_RUN_UMASK", mask)
    write(config(f"--reward.kwargs={json.dumps(JUDGE)}"), tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == mode
    write(config("--reward.kwargs={api_key: plain}"), tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("word", ["batch.groups", "learner.lr", "rollout.servers", "buffer.address", "data.shuffle"])
def test_an_error_shows_the_variable_and_not_its_value(word: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(f"--{word}=${{oc.env:EDGE_KEY}}")
    assert "4711" not in str(error.value) and "${oc.env:EDGE_KEY}" in str(error.value)


def test_a_value_by_way_of_another_key_is_one_of_the_variable() -> None:
    kwargs = '{a: "${oc.env:EDGE_KEY}", b: "${reward.kwargs.a}", c: "${oc.decode:${oc.env:EDGE_LIST}}"}'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_LIST", "[4711, secret-in-a-list]")
        made = config(f"--reward.kwargs={kwargs}")
        assert made.reward.kwargs["c"] == [4711, "secret-in-a-list"] and variables(made) == ["EDGE_KEY", "EDGE_LIST"]
        assert "4711" not in everywhere(made) and parse(dump(made)) == made
    assert visible("secret-in-a-list") == "${oc.decode:${oc.env:EDGE_LIST}}"


def test_a_plain_credential_stands_in_the_config_file_only() -> None:
    given = {"api_key": "sk-plain-0123456789", "url": "https://me:pass-0815@host/v1"}
    command = ["agent", "--api-key", "sk-plain-0123456789", "--password=pass-0815"]
    made = config(f"--reward.kwargs={json.dumps(given)}", f"--rollout.agent.command={json.dumps(command)}")
    for form in (settings(made), disclosed(made), shared(made)):
        text = json.dumps(form)
        assert "0123456789" not in text and "0815" not in text and text.count(MASK) >= 2
    assert parse(dump(made)) == made and "0123456789" not in visible("it was sk-plain-0123456789")
    rotated = config(f"--reward.kwargs={json.dumps(given | {'api_key': 'sk-2'})}", f"--rollout.agent.command={command}")
    assert fingerprint(rotated) == fingerprint(made) and changes(settings(made), rotated) == []


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *[(name, True) for name in ("api_key", "X-Api-Key", "Authorization", "WANDB_API_KEY", "hf_token", "HF_TOKEN")],
        *[(name, True) for name in ("--password", "AWS_SECRET_ACCESS_KEY", "openai_api_key", "secret", "token")],
        *[(name, False) for name in ("api_key_env", "max_tokens", "end_token", "key", "tokenizer", "keys", "authors")],
    ],
)
def test_credentials_are_known_by_name(name: str, is_one: bool) -> None:
    assert is_credential(name) == is_one


@pytest.mark.parametrize("form", ["{0}", "{0!r}", "a{0}b\n{0}", "https://host/?key={0}"])
def test_shown_texts_have_the_variable_in_place_of_its_value(form: str) -> None:
    config(f"--reward.kwargs={json.dumps(JUDGE)}")
    assert "4711" not in visible(form.format(SECRET)) and "${oc.env:EDGE_KEY}" in visible(form.format(SECRET))
    assert "4711" not in visible(json.dumps({"a": SECRET})) and "4711" not in visible("x" * 10**6 + SECRET, 100)


def test_recorded_values_are_compared_by_what_they_mean() -> None:
    made = config(f"--reward.kwargs={json.dumps(JUDGE)}")
    assert comparable("run.seed", 1, 2, made) == (1, 2)
    assert comparable("model.path", "m", "m", made) == ("m", "m")
