"""The adapter of a checkpoint behind vLLM's own API server, started with the flags that docs/lora.md names: its
log-probabilities over HTTP are the learner's, and the base beside it stays the base."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rollout.engine.arguments import environment
from rollout.engine.reward_server import API_SERVER
from tests.harness.adapted import make_base
from tests.harness.adapters import saved_by_learner
from tests.harness.ports import free_port
from tests.harness.toy import ROOT
from tests.harness.world import plain
from tests.rollout.engine.lora.test_adapter_engine import TEXT, make_config, worst

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]
RUN = """
import os, runpy, sys
os.environ.update({environment})
sys.argv = [{module!r}, *sys.argv[1:]]
runpy.run_module({module!r}, run_name="__main__")
"""


def asked(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that the server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("served")
    make_base(folder / "base")
    model = make_config(folder / "base").model
    saved = saved_by_learner(model, folder, TEXT)
    port = free_port()
    words = f"--model {folder / 'base'} --port {port} --dtype float32 --max-model-len 256 --enforce-eager"
    words += f" --kv-cache-memory-bytes {64 << 20}"
    words += f" --enable-lora --max-lora-rank 8 --lora-modules policy={saved.adapter}"  # as docs/lora.md has it
    command = [sys.executable, "-c", RUN.format(environment=environment(True), module=API_SERVER), *words.split()]
    with (folder / "log").open("w+") as log:
        process = psutil.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + 800
            while True:
                with suppress(OSError):
                    found = asked(f"{url}/v1/models")
                    break
                assert process.poll() is None and time.monotonic() < until, (log.seek(0), log.read()[-4000:])
                time.sleep(0.5)
            names = [each["id"] for each in found["data"]]
            yield SimpleNamespace(url=url, names=names, base=str(folder / "base"), model=model, saved=saved)
        finally:
            for each in (*process.children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


def logprobs_of(served: SimpleNamespace, name: str) -> list[float]:
    """Log-probabilities of `TEXT[1:]`, by the model `name`."""
    body = {"model": name, "prompt": TEXT, "max_tokens": 1, "prompt_logprobs": 0}
    (choice,) = asked(f"{served.url}/v1/completions", body)["choices"]
    places = choice["prompt_logprobs"][1:]
    return [place[str(token)]["logprob"] for place, token in zip(places, TEXT[1:], strict=True)]


def test_both_names_are_served(served: SimpleNamespace) -> None:
    assert served.names == [served.base, "policy"]


def test_the_adapter_is_the_learners_policy(served: SimpleNamespace) -> None:
    assert worst(logprobs_of(served, "policy"), served.saved.logprobs) < 1e-3


def test_the_base_beside_it_stays_the_base(served: SimpleNamespace) -> None:
    import torch

    with torch.no_grad():
        logp = plain(served.model)(input_ids=torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
    base = logp.gather(-1, torch.tensor(TEXT)[1:, None]).squeeze(-1).tolist()
    found = logprobs_of(served, served.base)
    assert worst(found, base) < 1e-3
    assert worst(found, served.saved.logprobs) > 0.1
