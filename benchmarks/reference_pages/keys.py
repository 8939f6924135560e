"""All keys of the run file, from the schema, for docs/reference/keys-*.md. Pure."""

import re
from collections.abc import Iterator, Mapping

from benchmarks.reference_pages.metrics import NOTE
from configs.help import Key, keys
from configs.schema import Config

PAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "keys-run.md": (
        "run, model, data, sampling, batch, reward, teacher",
        ("run", "model", "data", "sampling", "batch", "reward", "teacher"),
    ),
    "keys-learner.md": ("algorithm, learner, sft, eval", ("algorithm", "learner", "sft", "eval")),
    "keys-servers.md": ("rollout, weights, buffer, cluster, log", ("rollout", "weights", "buffer", "cluster", "log")),
}
"""The pages: their sections in words, and in order."""


def keys_pages() -> dict[str, str]:
    """The text of each page, by its file's name. Raises if a section of the schema is on no page."""
    shown = [section for _, sections in PAGES.values() for section in sections]
    if missing := [section for section in Config.model_fields if section not in shown]:
        raise ValueError(f"{missing}: name the section in benchmarks/reference_pages/keys.py")
    return {name: "\n".join(lines(*page)) + "\n" for name, page in PAGES.items()}


def lines(title: str, sections: tuple[str, ...]) -> Iterator[str]:
    """The lines of a page."""
    others = [f"[{other}]({name})" for name, (other, _) in PAGES.items() if other != title]
    yield f"# Keys: {title}\n\n{NOTE}\n"
    yield (
        "Keys of the run file with type, default and meaning, as `python -m configs --keys` prints them. **Bold**\n"
        "keys have no default: they must be set. `NAME` is a name that you choose, or the place in a list.\n"
        f"Other sections: {'; '.join(others)}."
    )
    for section in sections:
        yield f"\n## {section}\n\n| key | type | default | meaning |\n|---|---|---|---|"
        yield from (row(key) for name, key in keys().items() if name.partition(".")[0] == section)


def row(key: Key) -> str:
    """A line of the table."""
    name = f"**`{key.name}`**" if key.required else f"`{key.name}`"
    default = "" if key.required or not key.default else f"`{key.default}`"
    return f"| {name} | {cell(key.type)} | {cell(default)} | {cell(key.meaning)} |"


def cell(text: str) -> str:
    """A text that may stand in a cell. Code stays as it is; a page of documentation that it names becomes a link."""
    text = " ".join(text.split())
    parts = re.split(r"(`[^`]*`)", text)
    plain = [part if part.startswith("`") else part.replace("<", "&lt;") for part in parts]
    return re.sub(r"docs/([a-z-]+)\.md", r"[\1](../\1.md)", "".join(plain)).replace("|", "\\|")
