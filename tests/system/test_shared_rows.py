"""Whole runs whose learner has two ranks that share each row: real launcher, buffer and learner, and servers without
vLLM. The same run goes on with ranks that have rows of their own, and back."""

from collections import Counter
from pathlib import Path

import pytest

from configs.certificate import FILE, read
from tests.harness.toy import Run
from tests.system.test_starting_again import World

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def check_ledger(run: Run, versions: int, groups: int, samples: int) -> None:
    """Each batch was trained once, and has as many groups, and they as many samples, as the run file says."""
    assert run.query("select version, trained from batches order by version") == [(v, 1) for v in range(versions)]
    trained = Counter(run.query("select batch from items where state = 'trained'"))
    assert trained == {(version,): groups for version in range(versions)}
    assert run.query("select item from items where state in ('dropped', 'quarantined')") == []
    records = run.metrics()
    assert [record["version"] for record in records] == list(range(1, versions + 1))
    for record in records:
        assert record["samples"] == groups * samples
        assert 0 < record["tokens_sampled"] < record["tokens_computed"] <= record["tokens"]


def test_a_run_goes_on_with_another_number_of_ranks_to_a_row(tmp_path: Path) -> None:
    """Two ranks to a row, then one, then two."""
    world, ledger = World(tmp_path), {"groups": 2, "samples": 4}
    for versions, shared in ((2, 2), (4, 1), (6, 2)):
        words = (f"--run.versions={versions}", "--learner.ranks=2", f"--learner.context_parallel={shared}")
        code, out, err = world.launch("shared", *words)
        assert code == 0, out + err
        check_ledger(world.run("shared"), versions, **ledger)
        certificate = read(world.run("shared").path / FILE)
        split = [check for check in certificate.checks if check.what.startswith("two ranks, one row: ")]
        assert certificate.faults == [] and bool(split) == (shared == 2)
