"""What the buffer's process takes, by the run file alone: connections, open files, memory."""

from configs.checks import max_group_bytes
from configs.context_parallel import parts_of
from configs.flow.sequences import open_groups
from configs.schema import Config

WATCHERS = 8
"""The launcher and people who look at the run."""
OWN_FILES = 96
"""Ledger, segments, libraries, and spare ones."""
RESERVED_FILES = 16
"""The store opens its segments with these."""
CACHE_BYTES = 480 * 2**20
"""Samples in memory. Reading others takes ten times the processor time."""
IN_FLIGHT_BYTES = 32 * 2**20
"""Large answers on their way."""
PARKED_BYTES = 256 * 2**20
"""Groups that wait in memory while the store is full."""
COMMIT_BYTES = 16 * 2**20
BASE_BYTES, CONNECTION_BYTES, SAMPLE_BYTES, ROW_BYTES = 128 * 2**20, 2**16, 512, 16
"""The process, and each connection, open sample without tokens, and row without text."""
RECORD_BYTES, PLACE_BYTES = 320, 320
"""Each drawn row, and its place among those to be drawn with `data.difficulty`."""


def connections(config: Config) -> int:
    return config.rollout.most_servers + config.learner.ranks + WATCHERS


def open_files(config: Config) -> int:
    """Files that the buffer has open with all `connections`; a connection is one."""
    return connections(config) + OWN_FILES


def memory_bytes(config: Config, problems: int = 0) -> int:
    """Memory without the text of the problems. Two groups and a part go beyond the bounds, because the last one to come
    is taken whole."""
    group, stored = max_group_bytes(config), open_groups(config) * max_group_bytes(config)
    batch = config.batch.groups * group
    bounds = min(CACHE_BYTES, stored) + min(IN_FLIGHT_BYTES, batch) + min(PARKED_BYTES, stored) + COMMIT_BYTES
    known = connections(config) * CONNECTION_BYTES + open_groups(config) * config.batch.samples * SAMPLE_BYTES
    each = ROW_BYTES + RECORD_BYTES + (PLACE_BYTES if config.data.difficulty else 0)
    return BASE_BYTES + bounds + 2 * group + batch // parts_of(config.learner) + known + problems * each
