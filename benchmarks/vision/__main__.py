"""What do images cost on GPUs? A run, its server beside bare vLLM, pushes beside a frozen tower, loading of the tower.

`python -m benchmarks.vision --parts run,server,frozen,loading` wants two GPUs, one that serves and one that learns; on
one both share it, so that memory, probes and what is sent are those of a run, and its speeds are not: the
shape of Qwen2.5-VL-3B with random weights, photos of 300 to 1,000 tokens, every eighth row text only, groups of 8
samples of 256 tokens.
`run`: buffer, server and learner started by hand: versions an hour, utilisation with the tower counted, memory beside
the learner's estimate, probes with a picture under real pushes. `server`: as `benchmarks.rollout`, compared with bare
`LLM.generate` on the same images and lengths. `frozen`: pushes with everything trained and with
`model.freeze: [vision, projector]`, probes of a text, of a picture, and of another picture. `loading`: by which way
vLLM's model takes a policy, and whether the faster way would leave the same parameters.

Each part fits 10 minutes alone, and keeps what it found in a file of its own beside `--out`; `--also` adds the files of
earlier commands to the table, `--parts ""` measures nothing more. Prints one table; writes JSON after each part.
`--shape speck-2.5-VL`, `speck-3-VL` and `speck-3.5-VL` are small forms for CPU; `Qwen3.5-2B-VL` is another large one.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.rollout import CONTENDERS, ServerBenchmark, ServerCase, measure
from benchmarks.runs.processes import FIRST_GPU, Died
from benchmarks.vision import loading, pushes, whole_run
from benchmarks.vision.cases import CASES
from benchmarks.weights.shapes import folder_of
from benchmarks.weights.table import ResultRow, measured_here, progress, write

BARE = ("llm", "llm-ours")


class VisionBenchmark:
    """The parts, and what they found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.shape, self.case = args, args.shape, CASES[args.shape]
        self.found: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.hardware: dict[str, Any] = {}

    def run(self) -> Any:
        """A whole run."""
        args = self.args
        given = {"engine": args.engine, "learner": args.learner, "freeze": args.freeze}
        return whole_run.measure_run(
            self.shape, self.case, args.versions, args.warm_up, args.work / "run", given, args.budget_s
        )

    def server(self) -> Any:
        """A server in full operation, and bare vLLM."""
        case = ServerCase(self.shape, self.case.running, self.case.length, 4, targets=dict.fromkeys(BARE, 0.0),
                          samples=self.case.samples)  # fmt: skip
        benchmark = ServerBenchmark("server", self.args, case)
        found: dict[str, Any] = {"rows": [], "failed": []}
        for _ in measure(benchmark):
            progress(f"server: {', '.join([*benchmark.found, *benchmark.failed])} done")
            rows = [vars(row) for row in list(benchmark.rows())]
            self.found["server"] = found = {"rows": rows, "failed": list(benchmark.failed.values())}
            self.keep("server")  # the contenders together may take longer than their machine is lent
        return found

    def frozen(self) -> Any:
        """Pushes both ways; the first one stays where the second fails."""
        args, found = self.args, self.found.setdefault("frozen", {})
        pushes.measure_pushes(
            self.shape, self.case, args.updates, args.gap, args.work / "frozen", args.engine, args.budget_s, found
        )
        return found

    def loading(self) -> Any:
        """vLLM's model alone, in a process of its own."""
        work: Path = self.args.work / "loading"
        work.mkdir(parents=True, exist_ok=True)
        folder, out, log = folder_of(self.shape, work), work / "found.json", work / "loading.log"
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.vision.loading", str(folder), str(out), "vision", "projector"]
        seen = {"CUDA_VISIBLE_DEVICES": str(FIRST_GPU)} if torch.cuda.is_available() else {}
        with log.open("ab") as file:
            subprocess.run(command, stdout=file, stderr=file, timeout=self.args.budget_s, env={**os.environ, **seen})
        if not out.exists():
            raise RuntimeError(f"it ended early, see {log}")
        return json.loads(out.read_text())

    def measure(self, part: str) -> None:
        """Measure one part and keep what it found in its file."""
        progress(f"{part}: {self.shape}")
        began = time.monotonic()
        try:
            self.found[part] = getattr(self, part)()
            if within := self.failures_within(part):
                self.failed[part] = "; ".join(within)
        except (Died, TimeoutError, OSError, KeyError, RuntimeError, subprocess.SubprocessError) as error:
            self.failed[part] = f"{type(error).__name__}: {error}"
            progress(f"{part} failed: {self.failed[part]}")
        progress(f"{part}: {time.monotonic() - began:.0f} s")
        if part in self.found:
            self.keep(part)

    def keep(self, part: str) -> None:
        """Write what a part found so far to its file."""
        self.hardware = measured_here()
        kept = {"shape": self.shape, "part": part, "found": self.found[part], "measured": self.hardware}
        file_of(self.args.out, part).write_text(json.dumps(kept, indent=1))

    def failures_within(self, part: str) -> list[str]:
        """Of contenders of a part that went on without them."""
        found = self.found[part]
        return found["failed"] if part == "server" else []

    def take(self, file: Path) -> None:
        """A part that an earlier command measured. Raises ValueError if it is of another shape."""
        kept = json.loads(file.read_text())
        if kept["shape"] != self.shape:
            raise ValueError(f"--also {file}: it is of {kept['shape']}, not of {self.shape}")
        self.found.setdefault(kept["part"], kept["found"])
        self.hardware = kept["measured"]

    def rows(self) -> list[dict[str, Any]]:
        """All parts in order."""
        rows = [ResultRow(f"FAILED: {part}", 0.0, "", why, case=part) for part, why in self.failed.items()]
        kinds: dict[str, Callable[[Any], Any]] = {
            "run": lambda found: whole_run.rows_of(found, self.shape, self.case),
            "server": lambda found: (ResultRow(**row) for row in found["rows"]),
            "frozen": lambda found: pushes.rows_of(found, self.shape),
            "loading": lambda found: loading.rows_of(found, self.shape),
        }
        for part, rows_of in kinds.items():
            rows += list(rows_of(self.found[part])) if part in self.found else []
        return [row.line() for row in rows]


PARTS = ("run", "server", "frozen", "loading")


def file_of(out: Path, part: str) -> Path:
    """Where a part's raw figures are kept."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.with_name(f"{out.stem}-{part}.raw.json")


def arguments() -> argparse.Namespace:
    """The command line."""
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--shape", default="Qwen2.5-VL-3B" if gpus else "speck-2.5-VL", choices=CASES)
    parser.add_argument("--budget-s", type=float, default=540.0, help="longest time of each part but `server`")
    parser.add_argument("--versions", type=int, default=12, help="of the run, after its warm-up")
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--freeze", type=lambda text: text.split(","), default=[], help="model.freeze of the run")
    parser.add_argument("--seconds", type=float, default=40.0, help="of the server's measurement")
    parser.add_argument("--waves", type=int, default=6, help="requests for each sequence of bare generate")
    parser.add_argument("--start-s", type=float, default=280.0, help="longest start of a contender of `server`")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="of `server`")
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4), default=min(2, max(1, gpus)))
    parser.add_argument("--side-by-side", type=int, default=1, help="0: bare calls one after the other")
    parser.add_argument("--updates", type=int, default=8, help="pushes of each way")
    parser.add_argument("--gap", type=float, default=7.5, help="seconds between pushes: two windows of tokens/s fit")
    parser.add_argument("--engine", type=json.loads, default={}, help="rollout.engine, as JSON")
    parser.add_argument("--learner", type=json.loads, default={}, help="keys of the section learner, as JSON")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="files of parts of earlier commands")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-vision"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "vision.json")
    parser.set_defaults(swapped=False)  # of `measure`: only two servers at once can be
    args = parser.parse_args()
    args.parts = [part for part in args.parts.split(",") if part]
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {min(unknown)!r} is not one of {', '.join(PARTS)}")
    args.work = args.work.resolve()
    return args


def main() -> int:
    args = arguments()
    benchmark = VisionBenchmark(args)
    for file in args.also:
        benchmark.take(file)
    for part in args.parts:
        benchmark.measure(part)
        write(args.out, "vision", benchmark.rows(), show=False, measured=benchmark.hardware)
    write(args.out, "vision", benchmark.rows(), measured=benchmark.hardware)
    return 1 if benchmark.failed else 0


if __name__ == "__main__":
    sys.exit(main())
