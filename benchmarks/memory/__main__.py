"""GPU memory of the learner's steps beside its estimate, at the microbatch that `auto` takes: does the estimate hold?

`python -m benchmarks.memory` needs GPUs and has three lists, `--list combinations` (many families, each with what it
keeps given), `--list shapes` (20 shapes of run files without keys for speed, for which `auto` decides everything) and
`--list critics` (a critic beside the policy).
Each combination is a process of its own for each of its ranks, as many at a time as there are GPUs. `--share 1/4` takes
the first of four parts of the list, for a machine that has one of four GPUs; `--only` takes names with one of these
words. `--card-gib 79.2` makes a larger GPU as small as an 80 GB card: another process holds the rest of its memory.
`--limit-s 200` starts nothing after so many seconds, and `--explain` adds what holds the peak. Without a GPU `--list
small` shows that the command works. Random weights. A shape that does not fit is refused before it starts, as a run is.
Prints one table and writes JSON after each combination; exits with 1 if one ran out of memory or is more than 5 % off.
What an earlier command measured stays in the file if it is of the same day, hardware and versions.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Condition, Lock
from typing import Any

import torch

from benchmarks.memory.combinations import COMBINATIONS, CRITICS, SHAPES, SMALL, Combination
from benchmarks.runs.ports import free_port
from benchmarks.weights.table import ResultRow, progress, write
from configs.load import ConfigError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
LISTS = {"combinations": COMBINATIONS, "shapes": SHAPES, "critics": CRITICS, "small": SMALL}
TOLERANCE = 0.05
CORES = 2
"""Processes at a time without a GPU."""
LONGEST_S = 240.0
"""A process that takes longer is killed."""
HOLDER = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(free - int(float(sys.argv[1]) * 2**30), 0), dtype=torch.uint8, device="cuda")
print(held.numel(), flush=True)
sys.stdin.read()
"""


class Gpus:
    """The GPUs that no combination uses."""

    def __init__(self, number: int) -> None:
        self.number, self._free, self._changed = number, list(range(number)), Condition()

    @contextmanager
    def taken(self, number: int) -> Iterator[list[int]]:
        """Wait for `number` of them, and use them."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= number)
            mine = [self._free.pop(0) for _ in range(number)]
        try:
            yield mine
        finally:
            with self._changed:
                self._free += mine
                self._changed.notify_all()


def seen(gpus: Sequence[int]) -> str:
    """What CUDA_VISIBLE_DEVICES says of the GPUs that have these numbers here."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return ",".join(given.split(",")[gpu] if given else str(gpu) for gpu in gpus)


@contextmanager
def smaller_card(gpu: int, gib: float) -> Iterator[None]:
    """Another process holds all memory of `gpu` but `gib` GiB, as long as this lasts. 0: no process holds any."""
    if not gib:
        yield
        return
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": seen([gpu])}
    words = [sys.executable, "-c", HOLDER, str(gib)]
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout
        try:
            if not holder.stdout.readline():
                raise SystemExit(f"--card-gib {gib}: GPU {gpu} has less memory, or another process uses it")
            yield
        finally:
            holder.stdin.close()


def measured(place: tuple[str, int], combination: Combination, gpus: Sequence[int], explain: bool) -> dict[str, Any]:
    """Run the ranks of a combination; rank 0's figures, with the peaks of all ranks. `error` if a rank failed."""
    shared = {
        "WORLD_SIZE": str(combination.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": seen(gpus), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.memory", "--list", place[0], "--one", str(place[1])]
    command += ["--explain"] * explain
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(combination.ranks)
    ]
    with ThreadPoolExecutor(len(ranks)) as pool:
        answers = [*pool.map(lambda process: answer(process, ranks), ranks)]
    first = next((found for found in answers if "error" in found), answers[0])
    return first | {"peaks": [found.get("peak") for found in answers]}


def answer(process: "subprocess.Popen[str]", others: Sequence["subprocess.Popen[str]"]) -> dict[str, Any]:
    """Return the last line of the process; `error` if there is none, and then `others` are killed, as they wait."""
    try:
        out, _ = process.communicate(timeout=LONGEST_S)
        lines = out.splitlines()
        if not process.returncode and lines:
            found: dict[str, Any] = json.loads(lines[-1])
            return found
        problem = f"exit code {process.returncode}: {lines[-1] if lines else 'it printed nothing'}"
    except subprocess.TimeoutExpired:
        problem = f"not done in {LONGEST_S:g} s"
    for each in others:
        each.kill()
    return {"error": problem}


def hardware() -> dict[str, Any]:
    """Date, hardware and versions, from a process of its own: this one must hold no GPU's memory."""
    code = "import json; from benchmarks.weights.table import measured_here; print(json.dumps(measured_here()))"
    words = [sys.executable, "-c", code]
    found: dict[str, Any] = json.loads(subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout)
    return found


def kept(file: Path, here: dict[str, Any], names: set[str]) -> dict[str, dict[str, Any]]:
    """Answers in `file` for `names` that an earlier command got on the same day with the same hardware and versions."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return {
        name: answer
        for name, answer in found.get("cases", {}).items()
        if name in names and here.items() <= found.items()
    }


def rows_of(combination: Combination, found: dict[str, Any]) -> list[ResultRow]:
    """The rows of a combination in the table."""
    name = combination.name
    if "error" in found:
        return [ResultRow("FAILED", 0.0, "", found["error"], case=name)]
    if "refused" in found:
        return [ResultRow("refused before it starts", 0.0, "", found["refused"], case=name)]
    if not found["peak"]:
        return [ResultRow("estimate; a CPU has no peak", found["estimate"], "GiB", case=name)]
    settings = ", ".join(f"{key} {value}" for key, value in found["settings"].items())
    what = f"peak memory, {found['largest']:,} tokens, {settings}"
    above = 100 * (found["estimate"] / found["peak"] - 1)
    return [
        ResultRow(what, found["peak"], "GiB", "estimate", found["estimate"], name),
        ResultRow("  estimate above peak", above, "%", "limit", 100 * TOLERANCE, name),
        ResultRow("  tokens/s of the last step", found["tokens/s"], "1/s", case=name),
    ]


def summary(answers: dict[str, dict[str, Any]], left_out: int) -> list[ResultRow]:
    """How many failed, were refused or are off."""
    failed = sum("error" in found for found in answers.values())
    refused = sum("refused" in found for found in answers.values())
    off = [abs(found["estimate"] / found["peak"] - 1) for found in answers.values() if found.get("peak")]
    return [
        ResultRow(f"of {len(answers)} ran out of memory or failed", failed, "", "limit", 0),
        ResultRow(f"of {len(answers)} were refused before they start", refused, ""),
        ResultRow(f"of {len(off)} are more than 5 % off", sum(each > TOLERANCE for each in off), "", "limit", 0),
        ResultRow("were not run: time or GPUs", left_out, ""),
    ]


def run(args: argparse.Namespace, chosen: dict[int, Combination]) -> int:
    """Measure each combination, and write what is known after each; the exit code."""
    gpus, lock, began = Gpus(torch.cuda.device_count() or CORES), Lock(), time.monotonic()
    here, every = hardware(), LISTS[args.list]
    answers = kept(args.out, here, {one.name for one in every} - {one.name for one in chosen.values()})

    def record() -> list[ResultRow]:
        rows = [row for one in every if one.name in answers for row in rows_of(one, answers[one.name])]
        rows += summary(answers, len(every) - len(answers))
        write(args.out, "memory", [row.line() for row in rows], show=False, measured=here | {"cases": answers})
        return rows

    def measure(index: int) -> None:
        with gpus.taken(chosen[index].ranks) as mine:
            if time.monotonic() - began > args.limit_s:
                return
            found = measured((args.list, index), chosen[index], mine, args.explain)
        progress(f"{chosen[index].name}: {json.dumps(found)}")
        with lock:
            answers[chosen[index].name] = found
            record()

    with ExitStack() as cards:
        for gpu in range(gpus.number):
            cards.enter_context(smaller_card(gpu, args.card_gib))
        with ThreadPoolExecutor(gpus.number) as pool:
            for done in [pool.submit(measure, index) for index, one in chosen.items() if one.ranks <= gpus.number]:
                done.result()
    for row in record():
        other = "" if row.against_value is None else f"{row.against_value:10.4g}"
        print(f"{row.case:<64} {row.what:<100} {row.value:10.4g} {row.unit:<4} {row.against:<8} {other}")
    return int(any(row.against == "limit" and row.value > (row.against_value or 0) for row in summary(answers, 0)))


def share(text: str) -> tuple[int, int]:
    """`1/4` is the first of four."""
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write 1/4 for the first of four")
    return int(number), int(parts)


def selected(items: Sequence[Combination], words: str, part: tuple[int, int]) -> dict[int, Combination]:
    """Combinations by their place in the list: those whose names have one of `words`, and of these one part."""
    named = [index for index, one in enumerate(items) if any(word in one.name for word in words.split(";"))]
    return {index: items[index] for index in named[part[0] - 1 :: part[1]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", default="combinations", choices=LISTS)
    parser.add_argument("--only", default="", help="names that contain one of these, apart by ;")
    parser.add_argument("--share", type=share, default=(1, 1), help="which part of what is left: 2/4")
    parser.add_argument("--card-gib", type=float, default=0.0, help="GiB that each GPU shows to a learner; 0: all")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start nothing after so many seconds")
    parser.add_argument("--explain", action="store_true", help="record what holds the peak")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.json")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        from benchmarks.memory.training import train

        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            torch.set_num_threads(1)
        try:
            found = train(LISTS[args.list][args.one], args.explain)
        except ConfigError as error:  # what a run says before it starts anything
            found = {"refused": str(error)}
        print(json.dumps(found), flush=True)
        sys.stdout.flush()
        os._exit(0)
    if not torch.cuda.is_available() and args.list != "small":
        parser.error("no GPU is found; --list small shows on a CPU that the command works")
    chosen = selected(LISTS[args.list], args.only, args.share)
    if not chosen:
        parser.error(f"--only {args.only!r}: no combination has such a name")
    return run(args, chosen)


if __name__ == "__main__":
    sys.exit(main())
