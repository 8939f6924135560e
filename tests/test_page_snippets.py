"""Run files, keys, flags of commands and imports that the pages for users contain are accepted."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from actors.certify import command as certify
from actors.doctor import findings
from actors.live import serve
from actors.scaling import command as scaling
from actors.supervise import launch
from actors.watch import status
from benchmarks.reference_pages.metrics import METRICS, described
from buffer import __main__ as buffer
from configs import __main__ as configs
from configs.checks import check, check_sft
from configs.help import keys, sections
from configs.load import load
from rollout import __main__ as rollout
from tests.pages import DOCS, ROOT

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
SMALLEST = "model: {path: m}\ndata: {train: d.parquet}\nreward: {function: exact_match}\n"
FOREIGN = "from-other-systems.md"
"""A page with keys of other systems."""
NO_RUN_FILE = "kubernetes.md"
"""Its YAML is Kubernetes's; `tests/actors/watch/test_operations_page.py` looks at it."""


def below(main: Callable[[list[str]], object], name: str, argv: list[str]) -> object:
    """Run a command of a package."""
    return main([name, *argv])


MAINS: dict[str, Callable[[list[str]], object]] = {
    "actors launch": launch.main,
    "actors status": status.main,
    "actors scale": scaling.main,
    "actors watch": serve.main,
    "actors certify": certify.main,
    "actors doctor": findings.main,
    "configs": configs.main,
    "buffer": buffer.main,
    **{f"buffer {name}": partial(below, buffer.main, name) for name in ("tail", "show", "problems")},
    "rollout": rollout.main,
    **{f"rollout {name}": partial(below, rollout.main, name) for name in ("evaluate", "reward", "teacher")},
}
"""Commands with flags of their own."""
FILE = re.compile(r".*\.(?:json|md|parquet|public|py|sqlite|token|yaml)")
"""Names of files, which look like keys."""
ATTRIBUTES = {"run.output"}
"""Attributes of an object `run` in Python, which look like keys."""
OF_OTHERS = {"datasets", "peft", "openai", "transformers"}
"""Packages that a reader may have to install."""


class Block(NamedTuple):
    """A block of code of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.parent.name}/{self.page.name}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield Block(page, text[: found.start()].count("\n") + 1, found[1], found[2])


def of(*languages: str) -> list[Block]:
    return [block for block in blocks() if block.language in languages]


@pytest.mark.parametrize("block", [each for each in of("yaml") if each.page.name != NO_RUN_FILE], ids=str)
def test_a_run_file_of_a_page_is_accepted(block: Block, tmp_path: Path) -> None:
    """By itself if it is whole, else laid over the smallest one; models, data and functions need not be there."""
    (tmp_path / "page.yaml").write_text(block.text)
    (tmp_path / "smallest.yaml").write_text(SMALLEST)
    is_whole = {"model", "data"} <= set(yaml.safe_load(block.text))
    config = load([*([] if is_whole else [str(tmp_path / "smallest.yaml")]), str(tmp_path / "page.yaml")])
    (check if config.sft.rows is None else check_sft)(config, files=())


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_the_python_of_a_page_binds_each_name_that_it_uses(block: Block) -> None:
    """A reader copies it as it is. A fragment of a file is marked `py`."""
    line = ["ruff", "check", "--isolated", "--select=F821", "--no-cache", "-"]
    done = subprocess.run([sys.executable, "-m", *line], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("block", of("python", "py"), ids=str)
def test_the_python_of_a_page_imports_what_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name in OF_OTHERS or importlib.util.find_spec(alias.name), alias.name
        elif isinstance(node, ast.ImportFrom):
            module = str(node.module)
            if module.partition(".")[0] not in OF_OTHERS:
                there = importlib.import_module(module)
                assert [alias.name for alias in node.names if not hasattr(there, alias.name)] == []


def spoken(page: Path) -> Iterator[str]:
    """Commands of a page, in blocks and in sentences: `actors launch RUN.yaml --dry-run`."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    called = (
        r"(?:python -m |headrace )((?:actors|buffer|configs|rollout|learner|launch|show|status|evaluate)\b[^`\n#;&]*)"
    )
    for found in re.finditer(called, text):
        yield found[1].replace("\\|", "|").rstrip()


def of_command(words: str) -> str | None:
    """The longest of MAINS with which `words` begin: `actors launch` of `launch my.yaml`."""
    fit = [name for name in MAINS if re.match(rf"(?:{name}|{name.removeprefix('actors ')})(?!\S)", words)]
    return max(fit, key=len, default=None)


def flags(command: str) -> Iterator[str]:
    """`--fork-from`, `--learner.ranks` of a command's words."""
    yield from re.findall(r"(?<!\S)\[?(--[a-z][\w.-]*)", command)


def is_key(name: str) -> bool:
    """Whether a run file may have this key: one of the schema, or one below a free map such as `rollout.engine`."""
    table = keys()
    above = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
    return (
        name in table
        or any(key.startswith(f"{name}.") for key in table)
        or any("a map" in table[key].type for key in above if key in table)
    )


def is_module(name: str) -> bool:
    place = ROOT / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file()


@pytest.mark.parametrize("name", MAINS)
def test_help_of_a_command_knows_the_flags_that_pages_show(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        MAINS[name](["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    given = {flag for page in PAGES for each in spoken(page) if of_command(each) == name for flag in flags(each)}
    assert sorted(flag for flag in given if "." not in flag and flag not in shown) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_keys_and_metrics_of_a_page_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    overrides = {flag[2:] for each in spoken(page) for flag in flags(each) if "." in flag} - {"a.b"}
    assert sorted(key for key in overrides if not is_key(key)) == []
    if page.name != FOREIGN:
        named = set(re.findall(rf"`((?:{'|'.join(sections())})\.[a-z_]+(?:\.[a-z_]+)*)(?:: [^`]*)?`", text))
        keys_of_page = {key for key in named - ATTRIBUTES if not FILE.fullmatch(key) and not is_module(key)}
        assert sorted(key for key in keys_of_page if not is_key(key)) == []
    kinds = "|".join(
        {metric.name.partition("/")[0] for group in METRICS.values() for metric in group if "/" in metric.name}
    )
    metrics = set(re.findall(rf"`((?:{kinds})/[\w@^-]+)`", text)) - {"problems/BAND"}
    assert sorted(name for name in metrics if described(name.replace("_B", "_1")) is None) == []


@pytest.mark.parametrize(("page", "example"), [("docs/start.md", "countdown"), ("examples/calculator/README.md",) * 2])
def test_the_item_that_a_page_of_a_toy_shows_has_its_samples_at_the_end_of_the_run(page: str, example: str) -> None:
    """Samples before the oldest checkpoint that is kept are removed, unless `buffer.keep` is all."""
    folder = (ROOT / page).parent if page.startswith("examples") else ROOT / "examples" / example
    config = load([str(folder / "quickstart.yaml")])
    (item,) = re.findall(r"python -m buffer show (\d+) runs/", (ROOT / page).read_text(encoding="utf-8"))
    versions, kept = config.run.versions, config.learner.checkpoint_every
    assert (versions - kept) * config.batch.groups < int(item) < versions * config.batch.groups
