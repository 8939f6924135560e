"""The run file: merging, overrides, what is refused and in which words, and the way back to YAML."""

import functools
import inspect
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.__main__ import main as show_configs
from configs.checks import check
from configs.explain import explain
from configs.help import EXAMPLES, RENAMED_KEYS, keys
from configs.load import ConfigError, MergedTree, load, read, write
from configs.resume import written
from configs.schema import Config, Section

NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(argv)
    return str(error.value)


def file(folder: Path, text: str, name: str = "run.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_files_are_merged_left_to_right_then_overrides(tmp_path: Path) -> None:
    first = file(tmp_path, "batch: {groups: 4, samples: 4}\nsampling: {stop: [a, b]}\nlearner:\n", "first.yaml")
    second = file(tmp_path, "batch: {groups: 5}\nsampling: {stop: [c]}\nlearner: {lr: 1e-6}\n", "second.yaml")
    config = load([first, second, *NEEDED, "--batch.samples", "6", "--rollout.engine.max_model_len=4096"])
    assert (config.batch.groups, config.batch.samples, config.sampling.stop) == (5, 6, ["c"])
    assert config.learner.lr == 1e-6
    assert config.rollout.engine == {"max_model_len": 4096}
    assert config.data.train == Path("d.parquet")


@pytest.mark.parametrize("text", ["1e-6", "4e-4", "0.0004", "3"])
def test_numbers_are_numbers(text: str) -> None:
    assert load([*NEEDED, f"--learner.lr={text}"]).learner.lr == float(text)
    assert load([*NEEDED, "--learner.lr", text]).learner.lr == float(text)


def test_overrides_have_yaml_types() -> None:
    argv = ["--data.epochs=null", "--data.shuffle=false", "--sampling.stop=[x, 'y']", "--reward.kwargs={scale: 1e-3}"]
    config = load([*NEEDED, *argv])
    assert (config.data.epochs, config.data.shuffle, config.sampling.stop) == (None, False, ["x", "y"])
    assert config.reward.kwargs == {"scale": 0.001}


def test_interpolation_reaches_keys_and_defaults(tmp_path: Path) -> None:
    path = file(tmp_path, "run: {versions: '${batch.samples}'}\nrollout:\n  sequences: ${batch.groups}\n")
    config = load([path, *NEEDED, "--batch.groups=7"])
    assert (config.rollout.sequences, config.run.versions) == (7, 8)
    assert "run.name" in refused(*NEEDED, "--run.name=${batch.nothing}")
    assert "--run.name" in refused(*NEEDED, "--run.name=${batch")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("optim.lrr", "learner.lr"),
        ("optim.lr", "learner.lr"),
        ("batch.sample", "batch.samples"),
        ("batch.n", "batch.samples"),
        ("bach.groups", "batch.groups"),
        ("max_staleness", "batch.max_staleness"),
        ("learner.tokens_per_microbach", "learner.tokens_per_microbatch"),
        ("trainer.total_epochs", "data.epochs"),
        ("optim.learning_rte", "learner.lr"),
        ("optim.learning_rate", "learner.lr"),
        ("algorithm.critic.learning_rte", "algorithm.critic.learning_rate"),
        ("rollout.gpu_memory_utilization", "rollout.engine.gpu_memory_utilization"),
    ],
)
def test_unknown_key_gets_a_suggestion(wrong: str, meant: str) -> None:
    assert refused(*NEEDED, f"--{wrong}=1") == f"{wrong}: no such key (--{wrong}); did you mean {meant}?"


def test_unknown_key_without_likeness_gets_what_there_is() -> None:
    assert "batch has groups, samples" in refused(*NEEDED, "--batch.zzzzzz=1")
    assert "the sections are run, model" in refused(*NEEDED, "--qqq.zzzzzz=1")


def test_all_problems_at_once_with_their_places(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "data:\n  train: a.parquet\noptim:\n  lrr: 1\nbatch:\n  groups: yes\n  samples: 1\n"
        "learner:\n  tokens_per_microbatch: many\n  betas: [1, 2, 3]\nweights: 5\nrun:\n  name: 7\n",
    )
    assert sorted(refused(path, "--run.versions=0").splitlines()) == sorted(
        [
            f"batch.groups: true is not a whole number >= 1 ({path}:6)",
            f"batch.samples: 1 is not a whole number >= 2 ({path}:7)",
            f'learner.tokens_per_microbatch: "many" is not a whole number >= 1 or auto ({path}:9)',
            f"learner.betas: [1, 2, 3] is not a list of 2, each a number >= 0 and < 1 ({path}:10)",
            "model.path: missing; set it, e.g. model.path: Qwen/Qwen2.5-1.5B-Instruct",
            f"optim.lrr: no such key ({path}:4); did you mean learner.lr?",
            "reward.function: missing; set it, e.g. reward.function: countdown",
            f"run.name: 7 is not text matching ^[A-Za-z0-9._-]+$ ({path}:13); put it in quotes: '7'",
            "run.versions: 0 is not a whole number >= 1 (--run.versions)",
            f"weights: 5 is not a section ({path}:11); write its keys below it, e.g. weights.host",
        ]
    )


@pytest.mark.parametrize("value", [".nan", ".inf", "-1", "fast", "[1]", "true"])
def test_a_learning_rate_must_be_a_positive_number(value: str) -> None:
    assert refused(*NEEDED, f"--learner.lr={value}").startswith("learner.lr: ")


@pytest.mark.parametrize("value", ["[]", "[0.9]", "[0.9, 0.95, 0.99]", "{}"])
def test_a_list_of_another_length_is_refused_whole(value: str) -> None:
    assert refused(*NEEDED, f"--learner.betas={value}") == (
        f"learner.betas: {value} is not a list of 2, each a number >= 0 and < 1 (--learner.betas)"
    )


def test_broken_files_name_file_and_line(tmp_path: Path) -> None:
    path = file(tmp_path, "batch:\n  groups: [1\nrun: 3\n")
    assert refused(path).startswith(f"{path}:3:4: not YAML: ")
    path = file(tmp_path, "batch: {groups: 1}\nbatch: {groups: 2}\n")
    assert refused(path).startswith(f"{path}:2:1: not YAML: ")
    path = file(tmp_path, "- a\n- b\n")
    assert refused(path).startswith(f"{path}: must be a map of sections (run, model,")
    path = file(tmp_path, "countdown")
    assert refused(path).startswith(f"{path}: must be a map of sections (run, model,")
    lines = refused("absent.yaml", str(tmp_path)).splitlines()
    assert lines[0] == f"absent.yaml: no such file (from {Path.cwd()}); correct the path"
    assert lines[1] == f"{tmp_path}: a folder; name a run file, such as {tmp_path}/config.yaml"
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}\n")
    assert refused(str(tmp_path / "latin.yaml")).startswith(f"{tmp_path / 'latin.yaml'}: cannot be read as text")


def test_options_that_are_none() -> None:
    assert refused(*NEEDED, "-v") == "-v: not an option; overrides are written --section.key=value"
    assert refused(*NEEDED, "--learner.compile") == (
        "--learner.compile: no value; write --learner.compile=true, or whatever it should be"
    )
    unknown = "no such option; keys of the run file are written --section.key=value"
    assert refused(*NEEDED, "--verbose") == f"--verbose: {unknown}"
    assert refused(*NEEDED, "--sampling.stop=[a").startswith('--sampling.stop: "[a" is not a YAML value: ')


def test_every_required_key_has_an_example() -> None:
    assert {key.name for key in keys().values() if key.required} == set(EXAMPLES)


def test_a_required_key_without_a_value_gets_an_example() -> None:
    with pytest.raises(ConfigError, match=r"data.train: nothing stands after it .*; set it, e\.g\. data\.train: "):
        load(["--data.train="])


def test_a_value_that_is_not_utf_8_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^--run\.folder: .*: not UTF-8, as a run file must be; correct it"):
        load(["--run.folder=" + os.fsdecode(b"/tmp/\xff")])


def test_a_file_with_too_long_a_name_is_one_line() -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        load(["x" * 300 + ".yaml"])


def test_read_exits_2_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    def no(config: Config) -> None:
        raise ConfigError(["one", "two"])

    for argv, words in (([], "usage: python -m buffer"), (NEEDED[:2], "reward.function: missing")):
        with pytest.raises(SystemExit) as end:
            read(argv, "python -m buffer")
        assert end.value.code == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        read(NEEDED, "python -m buffer", no)
    assert (end.value.code, capsys.readouterr().err) == (2, "one\ntwo\n")
    assert read(NEEDED, "python -m buffer", lambda config: None).model.path == "m"


@pytest.mark.parametrize(("written", "read_as"), [("true", True), ("false", False), ("auto", "auto")])
def test_a_key_of_true_false_or_a_word_takes_each(written: str, read_as: object) -> None:
    assert load([*NEEDED, f"--learner.compile={written}"]).learner.compile == read_as


def test_help_is_short_and_names_every_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        read(["--help"], "python -m learner")
    shown = capsys.readouterr().out
    assert (
        end.value.code == 0
        and len(shown.splitlines()) < 60
        and "python -m configs --keys [SECTION] lists every key" in shown
    )
    found = set()
    for section, names in re.findall(r"^  (\w+) +(.*(?:\n {13}.*)*)", shown, re.M):
        group = ""
        for name in re.split(r",\s+", names):
            whole = f"{group}{name}" if name.startswith(".") else name
            group = whole.rpartition(".")[0]
            found.add(f"{section}.{whole}")
    assert found == keys().keys()


def test_keys_of_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_configs(["--keys", "batch"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("batch:\n  --batch.groups ") and "--learner." not in shown
    assert show_configs(["--keys", "bath"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m configs --keys bath: no section of the run file; the sections are run, model, ")


@functools.cache
def source_of(section: type[Section]) -> str:
    """Return the source of the class and of its base classes."""
    return "".join(inspect.getsource(each) for each in section.__mro__ if issubclass(each, Section))


def docstring(section: type[Section], field: str) -> str:
    """The text below `field` in the source of the class, or of the base class that has the field."""
    found = re.search(
        rf'^    {field}: (?:(?!^    \w+:).)*?^    """(.*?)"""', source_of(section), re.DOTALL | re.MULTILINE
    )
    assert found, f"{section.__name__}.{field} has no docstring"
    return " ".join(found[1].split())


@pytest.mark.parametrize("columns", ["60", "200"])
def test_keys_are_listed_with_type_default_and_meaning(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert show_configs(["--keys"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= (77 if columns == "60" else 120)  # a long pattern is not broken
    words = " ".join(shown.split())
    for section, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, Section)
        owners = {name: (model, name) for name in model.model_fields}
        inside_of = {"rollout": ("chat", "agent", "environment"), "algorithm": ("critic",)}  # sections in a section
        for inside in inside_of.get(section, ()):
            owner = model.model_fields[owners.pop(inside)[1]].annotation
            owners |= {f"{inside}.{name}": (owner, name) for name in owner.model_fields}  # type: ignore[misc, union-attr]
        for name, (owner, leaf) in owners.items():
            assert f"--{section}.{name} " in words
            assert docstring(owner, leaf) in words
    assert "--batch.samples a whole number >= 2; default 8" in words
    assert "--model.path text; required" in words
    assert '--learner.tokens_per_microbatch a whole number >= 1 or auto; default "auto"' in words
    assert "--log.trackers a list, each one of tensorboard, wandb, swanlab; default []" in words


def test_a_written_config_reads_back(tmp_path: Path) -> None:
    stop = "--sampling.stop=['1e5', 'on', '', '2020-01-01']"
    config = load([*NEEDED, "--learner.lr=1e-6", stop, "--rollout.engine.a.b=[1, null]"])
    write(config, tmp_path / "new" / "config.yaml")
    assert load([str(tmp_path / "new" / "config.yaml")]) == config
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["config.yaml"]


@settings(max_examples=20)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20) | st.text("${}\\:a.1 #'\"-", max_size=12))
def test_any_text_survives_writing(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    config = load(NEEDED)
    data = config.data.model_copy(update={"system_prompt": text})
    write(config.model_copy(update={"data": data}), path)
    assert load([str(path)]).data.system_prompt == text


@pytest.mark.parametrize("name", ["two_gpus", "eight_gpus", "geometry_vl", "teacher"])
def test_templates_are_valid(name: str) -> None:
    config = load([str(Path(__file__).parents[2] / "configs" / f"{name}.yaml")])
    check(config, files=())
    assert not [line for line in explain(config, problems=7473) if line.startswith("note:")]


def test_reading_is_cheap() -> None:
    code = f"import sys, configs.explain, configs.load; configs.load.load({NEEDED!r}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "vllm", "ray", "transformers", "numpy"} & set(loaded)


def test_reading_twice_leaves_no_trace() -> None:
    load([*NEEDED, "--rollout.engine.a=1", "--reward.kwargs={b: 2}", "--log.trackers=[wandb]"])
    config = load(NEEDED)
    assert (config.rollout.engine, config.reward.kwargs, config.log.trackers) == ({}, {}, [])


def test_a_renamed_key_is_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = file(tmp_path, "weights:\n  deadline_s: 7\n  bucket_mib: 64\n")
    config = load([path, *NEEDED])
    assert (config.weights.timeout_s, config.weights.bucket_mib) == (7.0, 64)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (f"weights.deadline_s ({path}:2) is now weights.timeout_s: taken as such; rename it")
    caplog.clear()
    assert load([*NEEDED, "--weights.deadline_s=8"]).weights.timeout_s == 8.0
    assert "weights.deadline_s (--weights.deadline_s) is now weights.timeout_s" in caplog.text
    caplog.clear()
    write(config, tmp_path / "config.yaml")
    assert load([str(tmp_path / "config.yaml")]) == config
    assert not caplog.records


def test_a_renamed_key_beside_the_new_one_in_one_file_is_refused(tmp_path: Path) -> None:
    path = file(tmp_path, "weights:\n  deadline_s: 7\n  timeout_s: 8\n")
    assert refused(path, *NEEDED) == (
        f"weights.deadline_s ({path}:2) is now weights.timeout_s ({path}:3), and both are set; "
        "remove weights.deadline_s"
    )


def test_the_later_of_an_old_and_a_new_key_wins(tmp_path: Path) -> None:
    """An override wins over the old name of its key, as an earlier release has it in a run's config.yaml."""
    path = file(tmp_path, "weights:\n  deadline_s: 7\n")
    assert load([path, *NEEDED, "--weights.timeout_s=8"]).weights.timeout_s == 8
    assert load([path, *NEEDED, "--weights.deadline_s=9"]).weights.timeout_s == 9


def test_problems_of_a_renamed_key_keep_its_place(tmp_path: Path) -> None:
    path = file(tmp_path, "weights:\n  deadline_s: soon\n")
    assert refused(path, *NEEDED) == f'weights.timeout_s: "soon" is not a number > 0 ({path}:2)'
    assert refused(*NEEDED, "--weights=5", "--weights.deadline_s=5", "--weights=5").startswith("weights: 5 is not a se")


def test_a_key_may_be_renamed_into_another_section_with_all_below_it(caplog: pytest.LogCaptureFixture) -> None:
    merged = MergedTree()
    merged.add({"vllm": {"args": {"a": 1, "b": {"c": 2}}}, "rollout": {"servers": 2}}, lambda key: f"run.yaml:{key}")
    merged.rename({"vllm.args": "rollout.engine", "optim.lr": "learner.lr"})
    assert merged.tree == {"rollout": {"servers": 2, "engine": {"a": 1, "b": {"c": 2}}}}
    assert merged.where("rollout.engine.b.c") == " (run.yaml:vllm.args.b.c)"
    assert merged.where("vllm.args") == ""
    assert len(caplog.records) == 1


def test_renamed_keys_are_old_and_their_new_names_exist() -> None:
    assert set(RENAMED_KEYS.values()) <= set(keys())
    assert not set(RENAMED_KEYS) & set(keys())


def test_groups_in_flight_are_taken_times_the_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = file(tmp_path, "batch:\n  groups: 6\nrollout:\n  groups_in_flight: ${batch.groups}\n")
    assert load([path, *NEEDED, "--batch.samples=4"]).rollout.sequences == 24
    (record,) = caplog.records
    assert record.getMessage() == (
        f"rollout.groups_in_flight ({path}:4) is now rollout.sequences: taken as such, times batch.samples; rename it"
    )
    assert load([path, *NEEDED, "--rollout.sequences=auto"]).rollout.sequences == "auto"
    assert load([*NEEDED, "--rollout.sequences=auto", "--rollout.groups_in_flight=3"]).rollout.sequences == 24
    wrong = "is not auto or a whole number >= 1 (--rollout.groups_in_flight)"
    assert refused(*NEEDED, "--rollout.groups_in_flight=few") == f'rollout.sequences: "few" {wrong}'
    assert refused(path, *NEEDED, "--rollout.sequences=8", "--rollout.groups_in_flight=-3").endswith(f": -3 {wrong}")


def test_a_wrong_entry_of_a_list_is_named() -> None:
    assert refused(*NEEDED, "--log.trackers=[wandb, mlflow]").startswith(
        'log.trackers: "mlflow" in ["wandb", "mlflow"] is'
    )


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ([], 0.05),
        (["rollout.engine.quantization=fp8"], 1.0),
        (["rollout.engine.quantization=fp8", "weights.probe_every=1"], 1.0),
        (["rollout.engine.quantization=fp8", "weights.probe_tolerance=0.2"], 0.2),
    ],
)
def test_a_quantised_server_may_differ_more_from_the_learner(options: list[str], tolerance: float) -> None:
    assert load([*NEEDED, *(f"--{option}" for option in options)]).weights.tolerance == tolerance


@pytest.mark.parametrize("place", ["a value", "a key", "the checksum"])
def test_one_wrong_bit_in_a_written_file_is_refused(place: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write(load(NEEDED), path)
    text = path.read_bytes()
    at = {
        "a value": text.index(b"lr: 1") + 4,
        "a key": text.index(b"lr: 1"),
        "the checksum": text.index(b"crc32c ") + 8,
    }
    flipped = bytearray(text)
    flipped[at[place]] ^= 1
    path.write_bytes(flipped)
    assert f"{path}: its text does not fit its checksum" in refused(str(path))


def test_who_only_looks_at_a_run_is_warned_of_an_edited_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    write(load([*NEEDED, "--learner.lr=1e-6"]), path)
    path.write_text(path.read_text().replace("lr: 1.0e-06", "lr: 2.0e-06"))
    assert read([str(path)], "python -m actors status", lenient=True).learner.lr == 2e-6
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {path}: its text does not fit its checksum") and "remove its last line" in line
    for strict in (lambda: read([str(path)], "python -m learner"), lambda: written(tmp_path)):
        with pytest.raises((SystemExit, ConfigError)):
            strict()


def test_a_person_may_edit_a_written_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write(load([*NEEDED, "--learner.lr=1e-6"]), path)
    edited = path.read_text().replace("lr: 1.0e-06", "lr: 2.0e-06")
    path.write_text(edited)
    assert "if a person edited it, remove its last line" in refused(str(path))
    path.write_text(edited[: edited.index("# crc32c")])
    assert load([str(path)]).learner.lr == 2e-6
