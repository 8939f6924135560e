"""Pages: links lead somewhere, the site has all of them, and ten questions of readers have an answer."""

import re
from itertools import pairwise

import pytest

from tests.pages import DOCS, ROOT, PageLink, ReaderPath, anchor, broken, headings, links, navigation, pages, prose
from tests.sentences import in_folders

PAGES = [str(page.relative_to(ROOT)) for page in pages()]
MOST_LINES = 150
"""Lines of a page for users. The page of the architecture is for whoever changes the code."""
QUESTIONS = (
    ReaderPath("How do I train with my own reward on 8 GPUs?", "docs/your-run.md", "2. A reward"),
    ReaderPath("Does my model fit, and how fast is it?", "docs/fits.md", "What a run takes"),
    ReaderPath("Which models train?", "docs/models.md", "What is tried"),
    ReaderPath("What does this metric mean, and what do I do?", "docs/metrics.md", "Alerts"),
    ReaderPath("A server died: what was lost?", "docs/recovery.md", "What is lost"),
    ReaderPath("How do I add a loss?", "docs/algorithms.md", "Your own loss and advantage"),
    ReaderPath("I come from verl. What do I write?", "docs/from-other-systems.md", "verl"),
    ReaderPath("How do I run it on Slurm?", "docs/slurm.md", "Several nodes"),
    ReaderPath("How do I start it from a notebook?", "docs/scripts.md", "The module"),
    ReaderPath("How many servers do I need?", "docs/scaling.md", "How many servers"),
)
NOT_PAGES = {"docs/nope.md", "docs/a.md"}
"""Names that stand in tests only."""
SAID = {
    "docs/your-run.md": ("reward: {function: my_reward.py:score}", "learner: {ranks: 4}", "rollout: {servers: 4}"),
    "docs/fits.md": ("python -m configs RUN.yaml --gpu H100", "memory of rank 0", "(settings.md)"),
    "docs/models.md": ("reference/models-trained.md", "python -m actors certify MODEL"),
    "docs/metrics.md": ("`ess/token`", "(reference/metrics.md)"),
    "docs/recovery.md": ("| a rollout server |", "other servers make them again", "its problems are dispatched again"),
    "docs/algorithms.md": ("def loss(inputs, config)", "algorithm.loss: my/loss.py:loss"),
    "docs/from-other-systems.md": ("python -m configs --from", "`actor_rollout_ref."),
    "docs/slurm.md": ("#SBATCH", "python -m actors launch"),
    "docs/scripts.md": ("headrace.launch(", "run.metrics()"),
    "docs/scaling.md": ("python -m actors scale RUN --servers N", "servers:"),
}
"""What an answer must have at least."""


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    assert [why for why in map(broken, links(ROOT / page)) if why] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_one_title_and_no_heading_twice(page: str) -> None:
    titles = re.findall(r"^# (.+)$", prose(ROOT / page), re.MULTILINE)
    assert len(titles) == 1
    anchors = [anchor(heading) for heading in headings(ROOT / page)]
    assert len(anchors) == len(set(anchors))


@pytest.mark.parametrize("page", PAGES)
def test_lists_and_tables_begin_after_a_blank_line(page: str) -> None:
    """MkDocs shows them as text otherwise."""
    lines = ["", *prose(ROOT / page).splitlines()]
    stuck = [
        line
        for before, line in pairwise(lines)
        if before.strip()
        and ((line.startswith("|") and not before.startswith("|")) or re.match(r"(?:[-*]|\d+\.) ", line))
        and not re.match(r"\s|(?:[-*]|\d+\.) |\|", before)
    ]
    assert stuck == []


@pytest.mark.parametrize("page", sorted(str(page.relative_to(ROOT)) for page in DOCS.glob("*.md")))
def test_a_page_for_users_is_short(page: str) -> None:
    if page != "docs/architecture.md":
        assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_there(page: str) -> None:
    """`python -m NAME` names a module of the tree, or of a package that a command of the page installs."""
    named = set(re.findall(r"python -m ([a-z_][\w.]*\w)", (ROOT / page).read_text(encoding="utf-8")))
    places = {name: ROOT / name.replace(".", "/") for name in named - {"venv", "pip"}}
    absent = [name for name, place in places.items() if not place.with_suffix(".py").exists() and not place.is_dir()]
    assert absent == []


def test_every_page_that_the_code_names_is_there() -> None:
    """Messages and docstrings lead to pages: `see docs/rewards.md`."""
    folders = ("actors", "benchmarks", "buffer", "configs", "examples", "headrace", "learner", "rollout", "tests")
    files = [*(path for folder in folders for path in (ROOT / folder).rglob("*.py")), ROOT / "Makefile"]
    named = {name for file in files for name in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text(encoding="utf-8"))}
    assert "docs/rewards.md" in named
    assert sorted(name for name in named - NOT_PAGES if not (ROOT / name).exists()) == []


def test_the_readme_is_shorter_still() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_the_site_has_every_page_once() -> None:
    assert sorted(navigation()) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_pages_are_in_plain_english() -> None:
    assert list(map(str, in_folders(["docs", "README.md", "CONTRIBUTING.md"]))) == []


@pytest.mark.parametrize("path", QUESTIONS, ids=lambda path: path.question)
def test_a_question_of_a_reader_is_answered_two_clicks_from_the_readme(path: ReaderPath) -> None:
    linked = {link.target for link in links(ROOT / "README.md")}
    assert ROOT / path.page in linked
    assert path.heading in headings(ROOT / path.page)
    text = (ROOT / path.page).read_text(encoding="utf-8")
    assert [words for words in SAID[path.page] if words not in text] == []
    assert DOCS / "index.md" in linked
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert f"({path.page.removeprefix('docs/')}" in index


def test_a_link_that_leads_nowhere_is_found() -> None:
    page = ROOT / "README.md"
    assert "no such file" in str(broken(PageLink("README.md", ROOT / "docs/nope.md", "")))
    assert "no such heading" in str(broken(PageLink("README.md", page, "nope")))
    assert broken(PageLink("README.md", page, anchor("How fast"))) is None


def test_anchors_are_those_of_the_site() -> None:
    assert anchor("Losses (`algorithm.loss`)") == "losses-algorithmloss"
    assert anchor("Rows, and [links](a.md)") == "rows-and-links"
    assert anchor("The learner's speed") == "the-learners-speed"
