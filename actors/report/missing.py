"""Why a run, or some of its versions, lack what the page draws. Pure."""

from actors.watch.tuning import is_tuned
from configs.flow.alerts import FRESH
from configs.schema import Config

NO_ROUND = "no server had received a policy of the learner when the version was recorded"


def reasons(config: Config) -> dict[str, str]:
    """By name: why a metric, `evaluations` or `looks` may be missing."""
    found = {
        FRESH: "it is measured on tokens that the trained policy itself had sampled (age 0), and there were none; the "
        "alert takes the k3 of the youngest tokens of the version",
        "groups/flat": "no group was made between the batch before and this one",
        "weights/pause_s": NO_ROUND,
        "weights/lag_s": NO_ROUND,
        "memory/gpu_gib": "the learner uses no GPU",
        "looks": f"the learner writes a record of servers and buffer every {config.log.servers_every_s:g} s "
        "(log.servers_every_s), and has written none yet",
        "evaluations": _no_evaluation(config),
    }
    return {} if is_tuned(config) else found


def _no_evaluation(config: Config) -> str:
    if not config.data.eval:
        return "data.eval names no problems"
    if config.eval.every is None:
        return "eval.every is null: the run evaluates nothing while it trains"
    return "no evaluation has ended yet"
