"""`python -m tests.system.failures [WORD]`: run the cases, or those with WORD in their names, and print the table.

Without WORD it writes the table into docs/failures.md.
"""

import re
import sys
import tempfile
from pathlib import Path

from configs.inner_command import inner_words
from tests.harness.toy import ROOT
from tests.system.failures.cases import CASES
from tests.system.failures.story import Story, tell

PAGE = ROOT / "docs" / "failures.md"
HEAD = """# What a person sees when something fails

Look for your failure in the first column; the second one has the line of `python -m actors status`, without the parts
that repeat it. Each row was produced by real processes: buffer, rollout server, learner, keepers and display, with an
engine that answers at once and a learner that trains nothing. `reward.timeout_s` is 2 s or less where time runs out, a
batch has 8 groups. Times are from the launch and contain the start of all processes.
`python -m tests.system.failures` writes this page. [When attempts fail](failing.md#when-attempts-fail) says what to do,
[commands](operations.md#commands) has the exit codes.

In a run that has good rows too, they go on beside all of this: a test runs the rewards of this table that no group
survives as a third of the rows of one run, whose other groups are all scored and trained, and finds each of these items
dropped with its own words (`tests/system/failures/test_hostile_rewards.py`). A reward that prints 1 GiB fills nothing
and is scored (`tests/rollout/cage/test_cage.py`).

| what fails | what a person sees | where, after how many seconds | how the run ends | after |
|---|---|---|---|---|
"""


REPEATED = re.compile(
    r"; \d+ items? dropped, most often .*?(?=; \d+ of \d+ rows|$)|(?<= dropped) \((?:most often )?\w+: .*\)"
)
"""Parts of a message that say the reason once more."""


def row(story: Story) -> str:
    """A line of the table."""
    case = story.case
    seen = ", ".join(f"{place} {seconds:.0f}" for place, seconds in sorted(story.seen.items(), key=lambda s: s[1]))
    ends = next((line for line in reversed(story.text.splitlines()) if case.ends and case.ends in line), "")
    ends = ends.removeprefix("python -m learner: ") or "the last version is trained"
    cells = [
        case.name,
        REPEATED.sub("", story.status) or "nothing: the next call gets another process",
        seen or "-",
        f"exit code {story.code}: {REPEATED.sub('', ends)}",
        f"{story.seconds:.0f} s",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(word: str) -> None:
    rows = []
    for case in CASES:
        if word in case.name:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row(tell(case, Path(folder))))
            print(rows[-1], flush=True)
    if not word:
        PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    inner_words(further="WORD")
    main(" ".join(sys.argv[1:]))
