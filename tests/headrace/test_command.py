"""The command `headrace`: its table, and what it runs in a folder with packages of Headrace's names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.__main__ import COMMANDS as OF_ACTORS
from buffer.inspect import COMMANDS as OF_BUFFER
from configs import own_packages
from configs.checks import check
from configs.load import ConfigError, load
from headrace.__main__ import COMMANDS, PACKAGES, module_of, usage

NEEDED = ("--model.path=m", "--data.train=d.jsonl", "--reward.function=exact_match")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder whose packages end every process that imports one of them."""
    for name in ("configs", "actors", "buffer", "rollout", "learner", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the {name} of the user')\n")
    return tmp_path


def headrace(folder: Path, *words: str, safe: str = "-P", **variables: str) -> tuple[int, str, str]:
    line = [sys.executable, *filter(None, [safe]), own_packages.ENTRY, *words]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_every_command_of_the_packages_is_a_command_of_headrace() -> None:
    assert {*OF_ACTORS} <= {name for name, (package, _) in COMMANDS.items() if package == "actors"}
    assert {*OF_BUFFER, "scrub"} == {name for name, (package, _) in COMMANDS.items() if package == "buffer"}
    assert {*PACKAGES} == {*own_packages.PACKAGES}
    assert all(f"\n  {name} " in usage() for name in (*COMMANDS, *PACKAGES))


def test_a_command_is_a_module_with_arguments() -> None:
    assert module_of(["show", "17", "runs/my"]) == ("buffer", ["show", "17", "runs/my"])
    assert module_of(["configs", "run.yaml"]) == ("configs", ["run.yaml"])
    assert module_of(["actors.doctor.trial", "reward", "."]) == ("actors.doctor.trial", ["reward", "."])
    assert module_of(["os.path"]) is module_of(["pip"]) is None


@pytest.mark.parametrize(("safe", "path"), [("-P", "."), ("", "")])  # as the installed script starts it, and by hand
def test_a_command_runs_in_a_folder_with_packages_of_the_same_names(repository: Path, path: str, safe: str) -> None:
    code, out, err = headrace(repository, "launch", "no.yaml", safe=safe, PYTHONPATH=path)
    assert (code, out, err) == (2, "", f"no.yaml: no such file (from {repository}); correct the path\n")


def test_names_of_commands_in_messages_are_those_that_work_here(repository: Path) -> None:
    assert headrace(repository, "status") == (
        2,
        "",
        "usage: headrace status RUN; name a run's folder, or its run file\n",
    )
    missing = "headrace show: the following arguments are required: run; `headrace show --help` says more\n"
    assert headrace(repository, "show", "17") == (2, "", missing)
    code, out, _ = headrace(repository, "problems", "--help")
    assert code == 0 and out.startswith("usage: headrace problems [-h]")
    code, _, err = headrace(repository, "lunch")
    assert (code, err) == (2, "headrace: 'lunch': no such command; did you mean launch?\n")
    code, out, _ = headrace(repository, "--help")
    assert code == 0 and out.rstrip("\n") == usage()


def test_a_process_that_searches_its_folder_starts_others_as_ever() -> None:
    assert own_packages.command("buffer", "run.yaml") == (sys.executable, "-m", "buffer", "run.yaml")
    assert own_packages.named_as_called("see `python -m actors status`") == "see `python -m actors status`"
    code = "from configs.own_packages import *; import sys; print(command('learner', 'x')[1:]); "
    given = ["python -m actors launch, python -m buffer show 1, python -m learner, python -m pip"]
    given += [f"python -m {package} {name} RUN" for name, (package, _) in COMMANDS.items()]
    code += f"print(*map(named_as_called, {given}), sep=chr(10))"
    line = [sys.executable, "-P", "-c", f"{own_packages.PIN}; {code}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    started, *named = done.stdout.splitlines()
    assert started == str(("-P", own_packages.ENTRY, "learner", "x"))
    assert named[0] == "headrace launch, headrace show 1, headrace learner, python -m pip"
    assert named[1:] == [f"headrace {name} RUN" for name in COMMANDS]


def test_another_machine_has_the_entry_elsewhere() -> None:
    given = ("/their/python", "-P", "/their/headrace/__main__.py", "learner", "run.yaml")
    assert own_packages.of_this_machine(given)[2] == own_packages.ENTRY
    assert own_packages.of_this_machine(("python", "-m", "learner")) == ("python", "-m", "learner")


def test_ray_is_refused_where_it_would_import_the_users_packages(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load([*NEEDED, "--cluster.address=10.0.0.1:6379"])
    for folder, path in ((repository, ""), (repository.parent, str(repository))):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PYTHONPATH", path)
        with pytest.raises(ConfigError) as error:
            check(config, files=())
        assert len(error.value.problems) == 5
        assert error.value.problems[0].startswith("cluster.address: Ray (cluster.address) would import")
        check(load(NEEDED), files=())
    monkeypatch.chdir(own_packages.ROOT)
    monkeypatch.setenv("PYTHONPATH", own_packages.ROOT)
    check(config, files=())


def test_the_page_of_commands_ends_quietly_if_nobody_reads_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-P", own_packages.ENTRY, "--help"]
    done = subprocess.run(line, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert done.stderr == ""
