"""The lengths that `benchmarks.rollout` compares: the long tail, and the fixed one with as much attention to pay."""

import argparse
import random

import pytest

from benchmarks.rollout import ServerBenchmark, ServerCase


def benchmark(tmp_path, **given):
    args = argparse.Namespace(
        **{"work": tmp_path, "side_by_side": True, "gpus": 2, "contenders": "server,fixed,llm", **given}
    )
    return ServerBenchmark("tail", args, ServerCase("speck", 32, 128, 2, mean=32.0, targets={"fixed": 0.95}))


def test_the_tokens_before_one_are_those_of_geometric_lengths_that_are_cut(tmp_path):
    draw, lengths = random.Random(0), []
    for _ in range(20_000):
        length = 1
        while length < 128 and draw.random() > 1 / 32:
            length += 1
        lengths.append(length)
    before = sum(length * (length - 1) / 2 for length in lengths) / sum(lengths)
    assert benchmark(tmp_path).expected() == {"running": 32.0, "context": pytest.approx(before, rel=0.02)}


@pytest.mark.parametrize(
    ("side_by_side", "gpus", "at_once", "shared"),
    [(True, 2, True, True), (False, 2, False, False), (True, 1, False, True), (True, 4, False, False)],
)
def test_two_servers_run_at_once_where_each_has_a_gpu(side_by_side, gpus, at_once, shared, tmp_path):
    made = benchmark(tmp_path, side_by_side=side_by_side, gpus=gpus)
    assert (made.at_once, made.shared) == (at_once, shared)


def test_one_server_alone_gets_both_gpus(tmp_path):
    assert not benchmark(tmp_path, contenders="server").shared
