"""Write rows of the hub of data sets to the files that the run files in configs/ name.

`python -m examples.hub_rows gsm8k_numbers` writes train.parquet and test.parquet into data/gsm8k_numbers, with the
columns `problem` and `answer`, the number that ends GSM8K's answer; `geometry3k` writes both files of
hiyouga/geometry3k into data/geometry3k as they are. Needs a network; existing files are kept.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from configs.writing import WriteError, draft_of, removed_on_failure, writing

Fetch = Callable[[str, str], str]
"""Takes a data set's name and a file in it, and returns the path of a copy on this machine."""
SPLITS = ("train", "test")
SOURCES = {
    "gsm8k_numbers": ("openai/gsm8k", "main/{split}-00000-of-00001.parquet"),
    "geometry3k": ("hiyouga/geometry3k", "data/{split}-00000-of-00001.parquet"),
}
END = "####"
"""The number follows it."""


def fetch(name: str, file: str) -> str:
    """Download a file of a data set, or find it in the cache."""
    return hf_hub_download(name, file, repo_type="dataset")


def numbers(table: pa.Table) -> pa.Table:
    """Rows of GSM8K with the final number alone. Example: `"48 + 24 = 72\\n#### 1,072"` -> `"1072"`."""
    answers = [text.rpartition(END)[2].strip().replace(",", "") for text in table["answer"].to_pylist()]
    return pa.table({"problem": table["question"], "answer": answers})


def write(chosen: str, out: Path, get: Fetch = fetch) -> str:
    """Write both files unless they exist; one line for people."""
    files = {split: out / f"{split}.parquet" for split in SPLITS}
    if all(file.exists() for file in files.values()):
        return f"{out}: rows kept, written before"
    name, pattern = SOURCES[chosen]
    copies = {split: get(name, pattern.format(split=split)) for split in SPLITS}
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    for split, copy in copies.items():
        draft = draft_of(files[split])
        with writing(files[split]), removed_on_failure(draft):
            if chosen == "gsm8k_numbers":
                pq.write_table(numbers(pq.read_table(copy)), draft)
            else:
                shutil.copyfile(copy, draft)
            draft.replace(files[split])
    rows = [pq.read_metadata(file).num_rows for file in files.values()]
    return f"{out}: {rows[0]:,} rows to train on, {rows[1]:,} held out, from {name}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 without a network or room on the disk, 2 for wrong words."""
    parser = argparse.ArgumentParser(prog="python -m examples.hub_rows", description=__doc__)
    parser.add_argument("rows", choices=SOURCES)
    parser.add_argument("--out", type=Path, help="folder of both files; left out: data/ROWS")
    args = parser.parse_args(argv)
    try:
        print(write(args.rows, args.out or Path("data") / args.rows))
    except WriteError as error:
        print(f"hub_rows: {error}", file=sys.stderr)
        return 1
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        print(f"hub_rows: {SOURCES[args.rows][0]} cannot be had from the hub of data sets: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
