"""What a teacher server of the run answers to `POST /headrace/scores`: log-probabilities of vLLM, and refusals."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from buffer.wire.message import Array
from rollout.engine.door.vllm_client import VLLMValidationError
from rollout.engine.teacher_scores import TeacherScores, arrays, unless_gone
from rollout.teachers.messages import PATH, Scores, ScoreTexts, packed, read_answer, read_request
from tests.harness.engines import DENSE_VOCABULARY, SharedEngine
from tests.harness.fakes import until
from tests.harness.published import scores, tiny_qwen2

MODEL = "teachers/big"
TEXTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4], [200]]
SAMPLED = [[0, 0, 1, 0, 1, 1, 0], [0, 1], [0]]


def request(
    texts: list[list[int]] = TEXTS,
    sampled: list[list[int]] = SAMPLED,
    top_k: int = 0,
    model: str = MODEL,
    vocabulary: int = 512,
) -> ScoreTexts:
    return ScoreTexts(
        model=model,
        texts=[Array.of(np.array(text, np.int32)) for text in texts],
        sampled=[Array.of(np.array(each, np.uint8)) for each in sampled],
        top_k=top_k,
        vocabulary=vocabulary,
    )


async def posted(body: bytes, engine: Any = None, path: str = PATH) -> tuple[int, bytes]:
    """Status and body of the answer; 404 is the app's behind it."""
    sent: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = [
        {"type": "http.request", "body": body[:9], "more_body": True},
        {"type": "http.request", "body": body[9:]},
    ]

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404})
        await send({"type": "http.response.body", "body": b"behind"})

    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    await TeacherScores(MODEL, behind)({"type": "http", "method": "POST", "path": path, "app": app}, receive, send)
    return sent[0]["status"], sent[1]["body"]


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny_qwen2(vocabulary=DENSE_VOCABULARY, seed=5).save_pretrained(folder := tmp_path_factory.mktemp("teacher"))
    return folder


@pytest.mark.vllm
@pytest.mark.xdist_group("vllm-dense")
@pytest.mark.parametrize("top_k", [0, 1])
def test_scores_are_those_of_the_model(dense_engine: SharedEngine, dense_folder: Path, top_k: int) -> None:
    asked = request(top_k=top_k)

    async def scene(engine: Any) -> tuple[int, bytes]:
        await engine.load_folder(dense_folder)
        return await posted(packed(asked), engine._llm)

    status, body = dense_engine.play(scene)
    assert status == 200
    found = read_answer(body, asked)
    model = tiny_qwen2(vocabulary=DENSE_VOCABULARY, seed=5).eval()
    for at, (text, sampled) in enumerate(zip(TEXTS, SAMPLED, strict=True)):
        assert found.logprobs[at].numpy() == pytest.approx([0.0, *scores(model, text)], abs=1e-3)
        places = [place - 1 for place in np.flatnonzero(sampled)]
        with torch.no_grad():
            best = model(torch.tensor([text])).logits[0, places].log_softmax(-1).topk(top_k)
        assert found.ids[at].numpy().tolist() == best.indices.tolist()
        assert found.top[at].numpy() == pytest.approx(best.values.numpy(), abs=1e-3)


@pytest.mark.vllm
@pytest.mark.xdist_group("vllm-dense")
@pytest.mark.parametrize(
    ("text", "top_k", "words"),
    [
        ([5] * 5000, 0, b"5000"),
        ([5, 320], 0, b"texts.0: token 320 is out of vocabulary; 320 are known"),
        ([-1], 0, b"token -1"),
        ([5, 6], 100, b"100"),
    ],
)
def test_what_vllm_refuses_is_an_error_of_the_request(
    dense_engine: SharedEngine, text: list[int], top_k: int, words: bytes
) -> None:
    asked = request([text], [[0] * len(text)], top_k)
    status, body = dense_engine.play(lambda engine: posted(packed(asked), engine._llm))
    assert status == 400 and words in body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{}", b"not MessagePack"),
        (packed(Scores(logprobs=[], ids=[], top=[])), b"not a message of this wire: kind 'Scores'"),
        (packed(request(sampled=SAMPLED[:2])), b"ScoreTexts: 3 texts, 2 of sampled"),
        (packed(request(sampled=[[0], *SAMPLED[1:]])), b"ScoreTexts.sampled.0: uint8[1] for a text of 7"),
        (packed(request([[], *TEXTS[1:]], [[], *SAMPLED[1:]])), b"ScoreTexts.texts.0: int32[0]; a text is int32"),
        (packed(request(model="small")), b"ScoreTexts.model: small, but this server has teachers/big"),
    ],
)
async def test_another_request_is_refused_in_one_line(body: bytes, words: bytes) -> None:
    status, answer = await posted(body)
    assert status == 400 and words in answer and b"\n" not in answer


async def test_other_paths_are_left_to_vllm() -> None:
    assert await posted(b"{}", path="/v1/completions") == (404, b"behind")


def test_numbers_of_other_tokens_are_no_answer() -> None:
    text, sampled = np.array([4, 5, 6]), np.array([False, True, False])
    own, ids, top = arrays(text, sampled, 1, [5, 9, 6, 8], [-1.0, -0.5, -np.inf, -0.25])
    assert own.tolist() == [0.0, -1.0, -9999.0] and ids.tolist() == [[9]] and top.tolist() == [[-0.5]]
    with pytest.raises(RuntimeError, match="of other tokens than the text's"):
        arrays(text, sampled, 0, [5, 7], [-1.0, -2.0])


class Vllm:
    """Refuses texts of two tokens, and ends others only when they are cancelled, or at once, as vLLM's end does."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 512)

    def __init__(self, ends: bool = False) -> None:
        self.ends, self.running, self.most_running = ends, 0, 0

    async def generate(self, prompt: Any, parameters: Any, request_id: str) -> AsyncIterator[Any]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            if len(prompt["prompt_token_ids"]) == 2:
                raise VLLMValidationError("too long")
            if not self.ends:
                await asyncio.Event().wait()
            yield SimpleNamespace(prompt_logprobs=SimpleNamespace(token_ids=[], logprobs=[]))
        finally:
            self.running -= 1


async def test_a_refused_text_ends_the_work_for_the_others() -> None:
    vllm = Vllm()
    assert await posted(packed(request()), vllm) == (400, b"too long")
    await until(lambda: vllm.running == 0, 10)
    assert (vllm.running, vllm.most_running) == (0, 3)


async def test_texts_that_vllm_aborts_are_no_fault_of_the_request() -> None:
    """Any error but ValueError is answered with status 500, and the request is made again."""
    with pytest.raises(RuntimeError, match="vLLM ended a text of 7 tokens with 0 log-probabilities"):
        await posted(packed(request(TEXTS[:1], SAMPLED[:1])), Vllm(ends=True))


class Padded:
    """A teacher of eight tokens, of which the last is the most probable one."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 8)

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def generate(self, prompt: Any, parameters: Any, request_id: str) -> AsyncIterator[Any]:
        self.asked.append(parameters.prompt_logprobs)
        best = list(range(7, 7 - parameters.prompt_logprobs, -1))
        ids = [each for token in prompt["prompt_token_ids"][1:] for each in (token, *best)]
        yield SimpleNamespace(prompt_logprobs=SimpleNamespace(token_ids=ids, logprobs=[-9.0 + each for each in ids]))


@pytest.mark.parametrize(
    ("vocabulary", "best", "wanted"), [(8, [7, 6], [2]), (7, [6, 5], [2, 3]), (4, [3, 2], [2, 4, 6])]
)
async def test_the_most_probable_tokens_are_ones_that_the_policy_has(
    vocabulary: int, best: list[int], wanted: list[int]
) -> None:
    asked, teacher = request([[1, 2, 3]], [[0, 1, 1]], 2, vocabulary=vocabulary), Padded()
    status, body = await posted(packed(asked), teacher)
    found = read_answer(body, asked)
    assert status == 200 and found.ids[0].numpy().tolist() == [best] * 2 and teacher.asked == wanted
    assert found.top[0].numpy().tolist() == [[-9.0 + token for token in best]] * 2
    assert found.logprobs[0].numpy().tolist() == [0.0, -7.0, -6.0]


async def test_work_for_a_client_that_left_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    assert await unless_gone(receive, work()) is None
    await asyncio.wait_for(cancelled.wait(), 10)


def test_a_request_survives_its_wire() -> None:
    asked = request(top_k=5)
    assert read_request(packed(asked)) == asked
