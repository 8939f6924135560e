"""How many sequences a server may work on, and how many groups of a run may be open, by the run file alone."""

from math import ceil

from configs.checks import max_sample_tokens
from configs.schema import Config

MEAN_SHARE = 1 / 4
"""Mean length of a sample over the longest. Lengths are taken as geometric, cut there."""
GPU_SEQUENCES, MOST_GPU_SEQUENCES, CPU_SEQUENCES = 512, 1024, 256
"""Most sequences for `rollout.sequences: auto`. By `simulation.STEP_COST`, 512 are nine tenths as fast as 1,024, with
half the CUDA graphs to capture and half the logits: 0.6 MB a sequence in float32, of which the sampler makes copies."""


def share_of_batch(config: Config) -> int:
    return ceil(config.batch.groups / config.rollout.most_servers) * config.batch.samples


def max_sequences(config: Config, cpu: bool) -> int:
    """CUDA graphs are captured in steps of 16. `engine_arguments` adds room for the rest of the last group."""
    given, wanted = config.rollout.engine.get("max_num_seqs"), config.rollout.sequences
    if isinstance(given, int):
        return given
    on_gpu = min(max(GPU_SEQUENCES, share_of_batch(config)), MOST_GPU_SEQUENCES)
    most = (CPU_SEQUENCES if cpu else on_gpu) if wanted == "auto" else wanted
    return ceil(most / 16) * 16


def places(config: Config) -> int:
    """Sequences that a server has places for; with `auto`, at most."""
    most = max_sequences(config, config.rollout.device == "cpu")
    return most if config.rollout.sequences == "auto" else config.rollout.sequences


def mean_tokens(config: Config) -> float:
    """Assumed; the prompt is included."""
    return MEAN_SHARE * max_sample_tokens(config)


def admitted_staleness(config: Config) -> int:
    """The bound that admission keeps."""
    target = config.batch.target_staleness
    return config.batch.max_staleness if target is None else target


def open_groups(config: Config) -> int:
    """Most groups that are leased or stored at once: admission lets (staleness + 1) batches be open."""
    return (admitted_staleness(config) + 1) * config.batch.groups
