"""`python -m learner sft`: its losses are those of transformers, for any ranks and microbatches; it survives a kill."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from configs.certificate import Certificate, judged
from configs.checkpoint_files import complete
from configs.schema import ModelConfig
from learner.certify import process
from learner.record.metrics import read
from learner.saved.manifest import DataPosition, position_of
from learner.sft.answers import AnswerReader
from learner.sft.command import main
from learner.sft.demonstrations import read_demonstrations
from tests.harness.demonstrated import (
    CHATML,
    TURNS,
    chatml_tokenizer,
    demonstrations,
    jsonl,
    seeing_demonstrations,
    sft_config,
    sft_run,
)
from tests.harness.forked_learner import ForkedLearner, ranks_meeting_in
from tests.harness.pictured import seeing_model

Fork = Callable[..., list[ForkedLearner]]


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Fork]:
    """Start the ranks of `python -m learner` with these words, and the last rank with more; they end with the test."""
    with ExitStack() as stack:

        def begin(words: list[str], ranks: int = 1, last: Sequence[str] = ()) -> list[ForkedLearner]:
            meeting: list[dict[str, str]] = [{}]
            if ranks > 1:
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                stack.callback(lambda: store)  # lives as long
                meeting = ranks_meeting_in(store, ranks)
            started = []
            for rank, environment in enumerate(meeting):
                own = [*words, *last] if rank == ranks - 1 else words
                started.append(ForkedLearner(own, tmp_path / f"rank{rank}.log", environment))
                stack.callback(started[-1].kill)
            return started

        yield begin


def done(ranks: list[ForkedLearner], code: int = 0) -> str:
    """Wait for their end; stderr of the first."""
    ended = [rank.ended() for rank in ranks]
    assert [number for number, _ in ended] == [code] * len(ranks), ended
    return ended[0][1]


def records(run: Path) -> list[dict[str, Any]]:
    """The records without times, speeds and memory, which no two runs share."""
    clock = ("time", "memory", "tokens_per_s")
    return [{k: v for k, v in one.items() if not k.startswith(clock)} for one in read(run / "metrics.jsonl")]


def data_of(folder: Path, kind: str) -> dict[str, str]:
    """Trained and held-out rows, of images with a model that sees."""
    if kind == "images":
        seeing_model(folder / "model", "qwen3_vl", layers=2, depth=2)
    rows = seeing_demonstrations(folder, 24) if kind == "images" else demonstrations()
    return {"train": str(jsonl(folder / "rows.jsonl", rows)), "eval": str(jsonl(folder / "held.jsonl", rows[:7]))}


def losses(run: Path) -> list[float]:
    return [one["loss"] for one in read(run / "metrics.jsonl") if "loss" in one]


def weights(run: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"v{version:06d}" / "huggingface" / "model.safetensors")


class Recorded(Trainer):
    """transformers' Trainer in the order of its rows, with each step's loss as it is: its own log rounds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses: list[float] = []

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*args, **options)
        self.losses.append(float(loss))
        return loss


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    """A batch of texts as Trainer takes it."""

    def filled(columns: list[Any], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(columns, True, value)

    tokens = [torch.tensor(row.tokens, dtype=torch.int64) for row in rows]
    labels = [torch.where(torch.tensor(row.trained), ids, -100) for row, ids in zip(rows, tokens, strict=True)]
    mask = [torch.ones_like(ids) for ids in tokens]
    return {"input_ids": filled(tokens, 0), "labels": filled(labels, -100), "attention_mask": filled(mask, 0)}


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_the_losses_are_those_of_transformers_trainer(tmp_path: Path, fork: Fork, mesh) -> None:
    """50 steps of AdamW with warm-up, clipping and weight decay, in float32, on the same rows in the same order."""
    versions, learner = 50, {"weight_decay": 0.1, "max_grad_norm": 0.5, "checkpoint_every": 50}
    words = sft_run(tmp_path, run={"versions": versions}, learner=learner | {"tokens_per_microbatch": 256})
    started = fork(words)
    config = sft_config(tmp_path, run={"versions": versions}, learner=learner)
    reader = AnswerReader(chatml_tokenizer(), config)
    data = read_demonstrations(config, "data.train", config.data.train, reader)
    reader.close()
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    given = {"lr": config.learner.lr, "betas": config.learner.betas, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **given)
    warmup = config.learner.warmup_versions
    arguments = TrainingArguments(
        str(tmp_path / "trainer"),
        per_device_train_batch_size=8,
        max_steps=versions,
        max_grad_norm=0.5,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1.0))
    trainer = Recorded(
        model, arguments, padded, train_dataset=data.drawn(0, 8 * versions), optimizers=(optimizer, schedule)
    )
    trainer.train()
    done(started)
    ours = losses(tmp_path / "run")
    assert len(ours) == len(trainer.losses) == versions
    assert max(abs(a - b) for a, b in zip(ours, trainer.losses, strict=True)) < 1e-4
    assert ours[-1] < ours[0] / 2


KINDS = ["text", pytest.param("images", marks=pytest.mark.long)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.xdist_group("ranks")
def test_two_ranks_train_as_one(tmp_path: Path, fork: Fork, kind: str) -> None:
    """And small microbatches as one large one, though one rank has room for more."""
    held_out = data_of(tmp_path, kind)
    sft_run(tmp_path, data=held_out)  # makes the model
    for name, ranks, tokens in (("one", 1, "auto"), ("two", 2, 160 if kind == "text" else 100)):
        changed = {"ranks": ranks, "tokens_per_microbatch": tokens, "lr": 1e-2 if kind == "text" else 1e-3}
        words = sft_run(tmp_path, run={"name": name}, learner=changed, data=held_out, eval={"every": 3})
        roomy = ["--learner.tokens_per_microbatch=4000"] if ranks > 1 else []
        done(fork([*words, "--learner.gather=pass"], ranks, roomy))
    one, two = (records(tmp_path / name) for name in ("one", "two"))
    assert [each["version"] for each in one] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    encoded = ("images", "patches", "flops") if kind == "images" else ()  # once for each microbatch
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"microbatches", "tokens_microbatch_max", *encoded}:
            assert b[key] == pytest.approx(a[key], abs=1e-4, rel=1e-4), key
    ours, theirs = weights(tmp_path / "one", 6), weights(tmp_path / "two", 6)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)
    assert max(record.get("microbatches", 0) for record in two) > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.xdist_group("ranks")
def test_killed_and_resumed_it_is_as_if_never_killed(tmp_path: Path, fork: Fork, kind: str) -> None:
    """Bit for bit: the losses, the held-out losses, and the weights."""
    changes = {"data": data_of(tmp_path, kind), "eval": {"every": 2}}
    done(fork(sft_run(tmp_path, run={"name": "whole", "versions": 12}, **changes)))
    words = sft_run(tmp_path, run={"name": "killed", "versions": 12}, **changes)
    killed, checkpoints = tmp_path / "killed", tmp_path / "killed" / "checkpoints"
    (learner,) = fork(words)
    end = time.monotonic() + 120
    while not (checkpoints.exists() and complete(checkpoints)) and time.monotonic() < end:
        time.sleep(0.01)
    learner.kill()
    assert complete(checkpoints) and not (checkpoints / "v000012").exists(), "it was too fast to be killed"
    assert "restored version" in done(fork(words))
    assert records(killed) == records(tmp_path / "whole")
    ours, theirs = weights(killed, 12), weights(tmp_path / "whole", 12)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    found = position_of(checkpoints / "v000012")
    assert found and found.model_copy(update={"began": None}) == DataPosition(data=_digest(tmp_path), rows=12 * 8)


def _digest(folder: Path) -> str:
    found = position_of(folder / "whole" / "checkpoints" / "v000012")
    assert found is not None
    return found.data


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_a_signal_ends_it_with_a_checkpoint(tmp_path: Path, fork: Fork) -> None:
    words = sft_run(tmp_path, run={"versions": 100_000}, learner={"checkpoint_every": 50_000})
    (learner,) = fork(words)
    end = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.01)
    learner.send_signal(signal.SIGTERM)
    assert "SIGTERM: finishing this version and its checkpoint" in done([learner])
    versions = [record["version"] for record in read(tmp_path / "run" / "metrics.jsonl")]
    assert complete(tmp_path / "run" / "checkpoints") == [versions[-1]]


def test_a_model_whose_certificate_fails_is_refused(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    check = judged("two ranks = one", 1.0, 1e-4, fault="its Qwen2Attention (layers.0.self_attn) differs")
    asked = []

    def made(model: ModelConfig, share: bool, splits: bool, served: bool) -> Certificate:
        asked.append((share, splits))
        return Certificate(model=model.path, kind="qwen2", checks=(check,), remedy="take another")

    monkeypatch.setattr(process, "made", made)
    assert main(sft_run(tmp_path)[1:]) == 2
    problem = "two ranks = one: its Qwen2Attention (layers.0.self_attn) differs; take another"
    assert f"python -m learner sft: model.path: {tmp_path / 'model'} (qwen2): {problem}" in capsys.readouterr().err
    assert asked == [(False, False)], "no row of a demonstration shares its prompt"


def test_a_process_without_a_certificate_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def made(model: ModelConfig, share: bool, splits: bool, served: bool) -> Certificate:
        raise process.NoCertificate("model.path: m: memory is short")

    monkeypatch.setattr(process, "made", made)
    assert main(sft_run(tmp_path)[1:]) == 1
    assert capsys.readouterr().err.endswith("python -m learner sft: model.path: m: memory is short\n")


def test_a_model_that_vllm_computes_otherwise_is_trained_with_a_warning(
    tmp_path: Path, monkeypatch: Any, capsys: Any, caplog: Any
) -> None:
    words, asked = sft_run(tmp_path)[1:], []
    file = tmp_path / "model" / "config.json"
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | windows))

    def made(model: ModelConfig, share: bool, splits: bool, served: bool) -> Certificate:
        asked.append(served)
        raise process.NoCertificate("enough is seen")

    monkeypatch.setattr(process, "made", made)
    assert main(words) == 1 and asked == [False]
    assert "enough is seen" in capsys.readouterr().err
    (warning,) = [line for line in caplog.messages if "is trained as transformers computes it" in line]
    assert "layer_types in its config.json leaves 1 of 2 layers without a sliding window" in warning


def test_the_folder_of_another_run_is_refused_before_a_certificate_is_made(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """A certificate of this run would replace that run's own."""
    words = sft_run(tmp_path)[1:]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(
        "model: {path: m}\ndata: {train: t.jsonl}\nreward: {function: countdown}\n"
    )
    monkeypatch.setattr(process, "made", lambda *given, **also: pytest.fail("a certificate was made"))
    assert main(words) == 2
    assert "sft.rows" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_wrong_rows_end_it_before_anything_is_written(tmp_path: Path, fork: Fork) -> None:
    """On every rank, with exit code 2."""
    words = sft_run(tmp_path, [*demonstrations(9), {"messages": TURNS[:1]}], learner={"ranks": 2})
    errors = done(fork(words, 2), code=2)
    assert f"python -m learner sft: data.train {tmp_path / 'train.jsonl'}: line 10: no message is trained" in errors
    assert {file.name for file in (tmp_path / "run").iterdir()} <= {"sft.lock", "logs", "certificate.json"}
    done(fork([*sft_run(tmp_path), "--run.versions=1", "--sft.turns=last"]))


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_an_image_that_is_gone_ends_it_and_it_goes_on_once_it_is_back(tmp_path: Path, fork: Fork) -> None:
    """Before training with exit code 2, in a training run with exit code 4."""
    learner = {"ranks": 2, "checkpoint_every": 1}
    words = sft_run(tmp_path, data=data_of(tmp_path, "images"), run={"versions": 100_000}, learner=learner)
    file, away = tmp_path / "0-0.png", tmp_path / "away.png"
    file.rename(away)
    assert f"line 1: image 0: {file}: No such file or directory; " in done(fork(words, 2), code=2)
    away.rename(file)
    started, checkpoints = fork(words, 2), tmp_path / "run" / "checkpoints"
    end = time.monotonic() + 200
    while not (checkpoints.exists() and complete(checkpoints)) and time.monotonic() < end:
        time.sleep(0.01)
    file.rename(away)
    ended = [rank.ended() for rank in started]
    assert [code for code, _ in ended] == [4, 4], ended
    problem = f"line 1: image 0 of the row: {file}: No such file or directory; bring the image back"
    assert any(f"python -m learner sft: data.train {tmp_path / 'rows.jsonl'}: {problem}" in line for _, line in ended)
    away.rename(file)
    newest = complete(checkpoints)[-1]
    assert "restored version" in done(fork([*words, f"--run.versions={newest + 1}"], 2))


@pytest.mark.xdist_group("ranks")
def test_a_run_goes_on_only_with_the_data_it_was_trained_on(tmp_path: Path, fork: Fork) -> None:
    words = sft_run(tmp_path, run={"versions": 2})
    done(fork(words))
    jsonl(tmp_path / "train.jsonl", demonstrations()[::-1])
    errors = done(fork([*words, "--run.versions=4"]), code=2)
    folder = tmp_path / "run" / "checkpoints" / "v000002"
    assert (
        f"data.train: the demonstrations, in tokens and pixels, are not those with which {folder} was trained" in errors
    )
    jsonl(tmp_path / "train.jsonl", demonstrations())
    errors = done(fork([*words, "--sft.rows=4"]), code=2)
    assert "sft.rows: 8 -> 4; it may not change while the run goes on: undo that, or begin another run with" in errors
    assert "--fork-from" not in errors
    done(fork([*words, "--run.versions=4"]))
    assert [record["version"] for record in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.xdist_group("ranks")
def test_a_run_goes_on_on_another_day(tmp_path: Path) -> None:
    """Although its chat template, as Llama 3.2's, writes the date: the texts are those of the day on which it began."""
    (tmp_path / "dated.jinja").write_text(f"<|im_start|>system\n{{{{ strftime_now('%d %b %Y') }}}}<|im_end|>\n{CHATML}")
    data = {"train": str(tmp_path / "train.jsonl"), "chat_template": str(tmp_path / "dated.jinja")}
    words = sft_run(tmp_path, run={"versions": 2}, data=data)
    for versions, zone in ((2, "Etc/GMT+12"), (4, "Etc/GMT-14")):  # never the same date
        log = tmp_path / f"{versions}.log"
        done([ForkedLearner([*words, f"--run.versions={versions}"], log, {"TZ": zone})])
    found = [position_of(tmp_path / "run" / "checkpoints" / name) for name in ("v000002", "v000004")]
    assert {position.began for position in found if position} == {found[0] and found[0].began}


@pytest.mark.xdist_group("ranks")
def test_one_process_has_the_folder(tmp_path: Path, fork: Fork) -> None:
    words = sft_run(tmp_path, run={"versions": 100_000})
    (first,) = fork(words)
    end = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.01)
    errors = done([ForkedLearner(words, tmp_path / "second.log", {})], code=2)
    assert f"run.name: {tmp_path / 'run'} is in use by process {first.process.pid}" in errors


@pytest.mark.long
@pytest.mark.parametrize("kind", ["text", "images"])
@pytest.mark.xdist_group("ranks")
def test_an_adapter_and_the_best_checkpoint_by_held_out_loss(tmp_path: Path, fork: Fork, kind: str) -> None:
    learner = {"lr": 0.05, "keep_best": 1, "keep_checkpoints": 1, "checkpoint_every": 1}
    data = data_of(tmp_path, kind)
    model = {"lora": {"rank": 4}}
    words = sft_run(tmp_path, data=data, learner=learner, model=model, eval={"every": 1}, run={"versions": 5})
    done(fork(words))
    found = [one for one in read(tmp_path / "run" / "metrics.jsonl") if "eval/eval/loss" in one]
    held = {int(one["eval/version"]): one["eval/eval/loss"] for one in found}
    assert list(held) == [0, 1, 2, 3, 4, 5] and held[5] < held[0]
    best = min((version for version in held if version), key=held.__getitem__)
    assert complete(tmp_path / "run" / "checkpoints") == sorted({best, 5})
    assert (tmp_path / "run" / "checkpoints" / "v000005" / "adapter" / "adapter_model.safetensors").exists()
