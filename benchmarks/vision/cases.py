"""What `benchmarks.vision` loads each shape with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SeeingCase:
    """Answers of `length` tokens, `groups` of `samples` a version, `running` sequences on the server."""

    length: int
    running: int
    groups: int
    samples: int
    microbatch: int
    """Tokens of a microbatch."""
    tolerance: float = 0.3
    """Of the probe, in nats: a large random model in bfloat16 is some hundredths off, wrong weights 1 or more."""


SMALL = SeeingCase(length=24, running=16, groups=4, samples=4, microbatch=2048)
CASES = {
    "Qwen2.5-VL-3B": SeeingCase(length=256, running=256, groups=32, samples=8, microbatch=8192),
    "Gemma-3-4B-images": SeeingCase(length=256, running=256, groups=32, samples=8, microbatch=8192),
    "Gemma-3-4B-cut-images": SeeingCase(length=256, running=256, groups=32, samples=8, microbatch=8192),
    "speck-gemma-3-images": SMALL,
    "Qwen3.5-2B-VL": SeeingCase(length=256, running=256, groups=32, samples=8, microbatch=8192),
    "speck-2.5-VL": SMALL,
    "speck-3-VL": SMALL,
    "speck-3.5-VL": SMALL,
}
