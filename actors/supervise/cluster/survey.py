"""A look at every node of a cluster before anything is placed: its folder and its code."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.supervise.cluster.arrival import versions
from configs.origins import shared
from configs.resume import fingerprint
from configs.schema import Config

SURVEY_S = 120.0
"""Ray starts a worker on each node, and unpacks a shipped working directory."""


@dataclass(frozen=True)
class Survey:
    """Findings by address of a node."""

    without_folder: tuple[str, ...] = ()
    """Nodes without the working directory or something in it."""
    faults: tuple[str, ...] = ()


def survey(nodes: Mapping[str, str], config: Config) -> Survey:
    """A silent node has a fault."""
    import ray

    def look(cwd: str, names: set[str], wanted: dict[str, str], text: str, expected: str) -> tuple[bool, list[str]]:
        """Travels to the node as a whole: Headrace may be missing there."""
        import os

        has_folder = os.path.isdir(cwd) and names <= set(os.listdir(cwd))
        try:
            from actors.supervise.cluster.arrival import differences
            from configs.resume import fingerprint
            from configs.schema import Config
        except ImportError as error:
            return has_folder, [f"this Headrace is not installed: {error}"]
        if found := differences(wanted):
            return has_folder, found
        if (here := fingerprint(Config.model_validate_json(text))) != expected:
            return has_folder, [f"the run file means {here} there and {expected} here"]
        return has_folder, []

    remote, options = ray.remote(look), {"num_cpus": 0, "max_retries": 0}
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    cwd = Path.cwd()
    names = {each.name for each in cwd.iterdir() if not config.run.folder.is_relative_to(each)}
    text = shared(config)
    given = str(cwd), names, versions(), text, fingerprint(Config.model_validate_json(text))
    asked = {
        node: remote.options(**options, scheduling_strategy=place(node, soft=False)).remote(*given) for node in nodes
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=SURVEY_S)
    without_folder, faults = [], []
    for node, answer in asked.items():
        has_folder, found = _answer(answer)
        faults += [f"{nodes[node]}: {line}" for line in found]
        if not has_folder:
            without_folder.append(nodes[node])
    return Survey(tuple(without_folder), tuple(faults))


def _answer(reference: Any) -> tuple[bool, list[str]]:
    import ray

    try:
        answer: tuple[bool, list[str]] = ray.get(reference, timeout=0)
        return answer
    except ray.exceptions.GetTimeoutError:
        return True, [f"no answer in {SURVEY_S:.0f} s; see `ray status`"]
    except ray.exceptions.RayError as error:
        return True, [str(getattr(error, "cause", None) or error).strip().splitlines()[-1]]
