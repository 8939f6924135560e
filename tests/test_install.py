"""`make packages` on a machine whose package index lacks PyTorch's CPU wheels: stand-in indexes are folders."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def add_wheel(index: Path, name: str, version: str, requires: str = "") -> None:
    """Put a wheel without code into the package index in the folder `index`."""
    folder, file = index / name, f"{name}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / file, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{file.replace("+", "%2B")}">{file}</a>')


def install(tmp_path: Path, extra: str) -> subprocess.CompletedProcess[str]:
    """Install `toyvllm`, which is in one index and asks for a package of the other, as `make install` does Headrace."""
    add_wheel(tmp_path / "pypi", "toyvllm", "1.0", "toytorch==2.0+cpu")
    add_wheel(tmp_path / "pytorch", "toytorch", "2.0+cpu")
    settings = {"RUN": sys.executable, "EXTRA": extra, "TORCH_CPU": (tmp_path / "pytorch").as_uri()}
    settings["PACKAGE"] = f"--target {tmp_path / 'there'} toyvllm"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "MAKE"))}
    env |= {"PIP_INDEX_URL": (tmp_path / "pypi").as_uri(), "PIP_CONFIG_FILE": os.devnull}
    line = ["make", "packages", *(f"{key}={value}" for key, value in settings.items())]
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


def test_pytorchs_own_index_is_added_where_the_first_try_fails(tmp_path: Path) -> None:
    done = install(tmp_path, "cpu")
    assert done.returncode == 0, done.stderr
    assert "once more, with PyTorch's index of CPU wheels" in done.stdout
    assert {path.name for path in (tmp_path / "there").glob("*.dist-info")} == {
        "toyvllm-1.0.dist-info",
        "toytorch-2.0+cpu.dist-info",
    }


def test_a_gpu_machine_gets_no_cpu_wheels(tmp_path: Path) -> None:
    done = install(tmp_path, "gpu")
    assert done.returncode != 0 and "toytorch==2.0+cpu" in done.stderr
    assert not (tmp_path / "there").exists()
