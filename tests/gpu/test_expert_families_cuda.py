"""Mixtures of experts of each family on an NVIDIA GPU: does every load of a policy put every weight in its place?

`pytest -m gpu tests/gpu/test_expert_families_cuda.py -k gpt_oss` plays one family (tests/harness/pushed_families.py),
in bfloat16 with vLLM's Triton kernels. Prints one line of figures for each.
"""

import asyncio

import pytest
import torch

from tests.harness.expert_families import FAMILIES
from tests.harness.one_gpu import nothing_left
from tests.harness.pushed_families import AGAIN, Play, Seen
from tests.rollout.engine.test_expert_load import ON_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAR = 0.3
"""Mean difference of 24 decoded tokens, in nats, that one flipped choice of experts may reach; stale weights are 1.5
off."""


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    with nothing_left():
        return asyncio.run(Play(FAMILIES[request.param], tmp_path_factory.mktemp("family"), ON_GPU).run())


def test_each_policy_is_what_transformers_computes(seen: Seen, request, capsys) -> None:
    """`rounded` is how far transformers is in bfloat16, which flips experts too; `old` how far the weights before."""
    with capsys.disabled():
        print("\n" + seen.line(request.node.callspec.params["seen"]))
    for how, off in seen.off.items():
        assert off < 3 * seen.rounded[how], how
    for how, old in seen.old.items():
        assert 3 * seen.rounded[how] < old / 2, how


def test_the_first_weights_have_their_bits_again(seen: Seen) -> None:
    """After pushes of others, staged and in buckets, and after folders."""
    assert seen.repeated == 0.0
    assert seen.same == {"disk": 0.0, "full 2": 0.0, "bucket 2": 0.0, AGAIN: 0.0}


def test_each_kind_of_weight_is_loaded(seen: Seen) -> None:
    assert seen.kinds > 5 and not seen.silent


def test_decoded_tokens_have_the_log_probabilities_of_transformers(seen: Seen) -> None:
    for how, off in seen.decoded.items():
        assert off < max(3 * seen.decoded_rounded[how], FAR) < min(seen.old.values()) / 2, how


def test_a_servers_own_trial_accepts_it(seen: Seen) -> None:
    assert seen.trial.endswith("kinds hold"), seen.trial
