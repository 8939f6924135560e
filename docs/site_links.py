"""Hooks of MkDocs (mkdocs.yml): links from a page to a file outside of docs/.

Pages of the repository (README files, the log of measurements) become pages of the site below `tree/`. A link to any
other file, such as a module, stays as the name of that file, because the site does not have it.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("benchmarks/LOG.md", "CONTRIBUTING.md", "README.md", "examples/*/README.md")
LINK = re.compile(r"(!?)\[((?:[^\]\\]|\\.)*)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")


def site_pages() -> dict[str, str]:
    """The pages outside of docs/, and their places on the site."""
    found = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
    names = [str(path.relative_to(ROOT)) for path in found]
    return {name: f"tree/{name.replace('README', 'readme')}" for name in names}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/."""
    for name, place in site_pages().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to where their files are on the site."""
    place = page.file.src_uri
    outside = {there: name for name, there in site_pages().items()}
    source = outside.get(place, f"docs/{place}")

    def moved(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), link[3]))
        there = target.removeprefix("docs/") if target.startswith("docs/") else site_pages().get(target)
        if there is None:
            return link[2] if "`" in link[2] else f"{link[2]} (`{target}`)"
        return f"{link[1]}[{link[2]}]({os.path.relpath(there, os.path.dirname(place) or '.')}{link[4] or ''})"

    return LINK.sub(moved, markdown)
