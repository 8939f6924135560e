"""The forecast of a run: beside what was measured, for the shipped run files, and in words for users."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.doctor.findings import main as doctor_main
from actors.doctor.forecast import MFU, Forecast, forecast, mean_answer, patches_of
from actors.doctor.price import judge_price
from benchmarks.memory.combinations import COMBINATIONS
from benchmarks.memory.training import run_file_of
from benchmarks.weights.shapes import folder_of
from configs.__main__ import main
from configs.checks import check
from configs.flow.cards import CARDS, MIB, card_named, card_of
from configs.flow.decoding import ServedModel, step_time
from configs.flow.sequences import MEAN_SHARE
from configs.load import ConfigError, dump, load
from configs.schema import Config, LearnerConfig, LoraConfig, ModelConfig
from learner.model.flops import peak
from learner.model.memory import GIB, SHARE, estimate
from learner.model.settled import settle
from tests.harness.lanes import long_but
from tests.harness.shapes_of_models import seeing_folder, text_folder

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results"
NEEDED = ["--data.train=d.parquet", "--reward.function=countdown"]
OURS = {"activation_checkpointing": "none", "compile": True, "head_chunk_tokens": 4096}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("models")
    found = {name: text_folder(place / name, name) for name in ("1.5B", "7B", "30B-A3B, 8 layers")}
    found["half of 7B"] = text_folder(place / "half", "7B", num_hidden_layers=14)
    found["3B that sees"], found["7B that sees"] = seeing_folder(place / "3v"), seeing_folder(place / "7v", True)
    return {name: str(folder) for name, folder in found.items()}


def measured(file: str, what: str, column: str = "value") -> float:
    """A figure of `benchmarks/results`."""
    rows = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    (value,) = {row[column] for row in rows if what in row["what"]}
    return float(value)


MEASURED: list[tuple[str, str, str, str, int, dict[str, Any]]] = [
    ("learner-gather", "ours-1.5b: peak memory", "1.5B", "H200", 1, {"gather": "batch"}),
    ("learner-gather", "ours-1.5b-pass: peak memory", "1.5B", "H200", 1, {"gather": "pass"}),
    ("learner", "ours-1.5b: peak memory", "1.5B", "H200", 1, {"gather": "pass"}),
    ("learner-flash", "ours-1.5b-flash: peak memory", "1.5B", "H200", 1, {"gather": "pass"}),
    ("learner", "ours-7b-2: peak memory", "7B", "H200", 2, {"gather": "pass"}),
    ("learner-7b", "ours-7b-2-flash4: peak memory", "7B", "H200", 2, {"gather": "pass"}),
    ("learner", "ours-7b-4: peak memory", "7B", "H200", 4, {"gather": "pass"}),
    ("learner-7b-half", "ours-7b-14-flash4: peak memory", "half of 7B", "H100", 2, {"gather": "pass"}),
    ("learner-7b-half", "ours-7b-14-varlen: peak memory", "half of 7B", "H100", 2, {"gather": "pass"}),
    ("learner-lora", "ours-7b-lora: peak memory", "7B", "H100", 1, {"gather": "pass", "lora": {"rank": 32}}),
]
"""Steps whose microbatches filled the card as `auto` does: file, row, model, card, ranks, keys."""


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: f"{case[0]} {case[1]}")
def test_memory_is_within_5_percent_of_what_a_step_that_filled_the_card_took(
    case: tuple[str, str, str, str, int, dict[str, Any]], folders: dict[str, str]
) -> None:
    file, row, name, card, ranks, keys = case
    lora = keys.get("lora")
    model = ModelConfig(path=folders[name], lora=LoraConfig.model_validate(lora) if lora else None)
    learner = LearnerConfig.model_validate(OURS | {"gather": keys["gather"]})
    expected = estimate(model, learner, ranks)
    filled = expected.total(expected.fit(int(SHARE * CARDS[card].free)))
    assert filled / GIB == pytest.approx(measured(file, row), rel=0.05)


COMBINED = {
    one.name: (one, found)
    for one in COMBINATIONS
    if "peak" in (found := json.loads((RESULTS / "memory.json").read_text(encoding="utf-8"))["cases"].get(one.name, {}))
}
"""Combinations of `benchmarks.memory` that were measured, with what was recorded of them."""


@pytest.mark.parametrize("name", long_but([*COMBINED], 0, 1, 7, 11))
def test_memory_of_a_combination_is_at_most_1_percent_below_and_5_above_its_peak(name: str, tmp_path: Path) -> None:
    one, found = COMBINED[name]
    config = run_file_of(one, tmp_path)
    learner = config.learner.model_copy(update=found["settings"])
    expected = estimate(config.model, learner, one.ranks, sends=found["sends"]).total(found["largest"])
    assert -0.01 <= expected / GIB / found["peak"] - 1 <= 0.05


def test_at_least_eight_combinations_were_measured() -> None:
    assert len(COMBINED) >= 8


def test_memory_of_a_long_document_is_within_1_percent(folders: dict[str, str]) -> None:
    """One microbatch is the whole batch, so gradients come while activations go; four ranks share its tokens."""
    given = {"activation_checkpointing": "block", "gather": "pass", "head_chunk_tokens": 4096, "compile": False}
    learner = LearnerConfig.model_validate(given | {"context_parallel": 4, "ranks": 4})
    expected = estimate(ModelConfig(path=folders["7B"]), learner, 4, alone=True).total(131_072)
    assert expected / GIB == pytest.approx(measured("long_documents", "memory of a GPU, peak"), rel=0.01)


@pytest.mark.parametrize(
    ("file", "freeze", "gather"),
    [("vision", ["vision", "projector"], "pass"), ("vision-whole", [], "batch")],
    ids=["frozen", "whole"],
)
def test_memory_of_a_run_that_sees_is_within_5_percent(
    file: str, freeze: Any, gather: str, folders: dict[str, str]
) -> None:
    model = ModelConfig(path=folders["3B that sees"], freeze=freeze)
    given = {"activation_checkpointing": "block", "gather": gather, "head_chunk_tokens": 4096}
    expected = estimate(model, LearnerConfig.model_validate(given), 1, sends=True).total(16384)
    assert expected / GIB == pytest.approx(measured(file, "learner's peak memory"), rel=0.05)


def test_memory_of_gemma_3_with_images_is_within_5_percent(tmp_path: Path) -> None:
    model = ModelConfig(path=str(folder_of("Gemma-3-4B-images", tmp_path)), freeze=["vision", "projector"])
    given = {"activation_checkpointing": "block", "gather": "batch", "head_chunk_tokens": 4096}
    expected = estimate(model, LearnerConfig.model_validate(given), 1, sends=True).total(8192)
    assert expected / GIB == pytest.approx(measured("vision-gemma3", "learner's peak memory"), rel=0.05)


def test_memory_with_experts_is_within_5_percent(folders: dict[str, str]) -> None:
    model = ModelConfig(path=folders["30B-A3B, 8 layers"])
    learner = LearnerConfig.model_validate(OURS | {"gather": "pass"})
    expected = estimate(model, learner, 1)
    filled = expected.total(expected.fit(int(SHARE * CARDS["H200"].free)))
    assert filled / GIB == pytest.approx(measured("experts", "ours-compiled: peak memory"), rel=0.06)  # 4.8 % more


@pytest.mark.parametrize(
    ("file", "what", "case", "card", "sequences", "rel"),
    [
        ("rollout-1.5B", "tokens/s of a server in full operation", "1.5B", "H200", 512, 0.06),
        ("rollout-1.5B-H100", "tokens/s of a server in full operation", "1.5B", "H100", 512, 0.06),
        ("rollout-7B", "tokens/s of a server in full operation", "7B", "H100", 512, 0.06),
        ("adapters", "tokens/s with an adapter", "7B", "H100", 128, 0.06),
    ],
)
def test_a_server_s_speed_is_within_6_percent(
    file: str, what: str, case: str, card: str, sequences: int, rel: float
) -> None:
    """The benchmark of adapters has the server without one as its peer."""
    sizes = {"1.5B": (1_543_714_304, 28_672 // 2), "7B": (7_070_619_136, 57_344 // 2)}
    read, kv_numbers = sizes[case]
    found, context = CARDS[card], 255 if sequences == 512 else 256
    assert found.peak and found.bandwidth
    step = step_time(ServedModel(read, read, kv_numbers, 2), found.peak, found.bandwidth, 1, context)
    column = "against_value" if file == "adapters" else "value"
    assert step.tokens_per_s(sequences) == pytest.approx(measured(file, what, column), rel=rel)


def test_a_learner_s_mfu_is_within_20_percent_of_all_that_were_measured_compiled() -> None:
    found = [
        measured(file, row)
        for file, row in (
            ("learner-gather", "ours-1.5b: MFU"),
            ("learner-7b", "ours-7b-2-flash4: MFU"),
            ("learner-7b-half", "ours-7b-14-varlen: MFU"),
            ("learner-lora", "ours-7b-lora: MFU"),
            ("defaults", "mfu"),
        )
    ]
    assert all(pytest.approx(mfu, rel=0.2) == MFU for mfu in found)


def forecast_of(card: str, path: str, *argv: str) -> Forecast:
    config = load([*argv, f"--model.path={path}"])
    return forecast(config, card_named(card), patches_of(config))


SHIPPED = [
    ("eight_gpus", "7B", ()),
    ("two_gpus", "1.5B", ()),
    ("geometry_vl", "3B that sees", ()),
    ("geometry_vl", "7B that sees", ("--learner.ranks=4", "--rollout.servers=4", "--batch.groups=128")),
]


@pytest.mark.parametrize("card", ["H100", "A100-80G"])
@pytest.mark.parametrize(("file", "model", "changes"), SHIPPED)
def test_shipped_run_files_fit_the_80_gb_that_they_name(
    file: str, model: str, changes: tuple[str, ...], card: str, folders: dict[str, str]
) -> None:
    text = (ROOT / f"configs/{file}.yaml").read_text(encoding="utf-8")
    assert "80 GB" in text
    found = forecast_of(card, folders[model], str(ROOT / f"configs/{file}.yaml"), *changes)
    ranks = [found.settled.first, *([found.settled.others] if found.settled.others else [])]
    assert all(rank.total <= SHARE * found.card.free and rank.tokens >= rank.least for rank in ranks)
    assert found.room.tokens and found.room.tokens > 100_000
    judgement = judge_price(found.config, found.card)
    assert not judgement.refused and not judgement.warnings


def test_a_budget_above_what_auto_takes_is_a_warning(folders: dict[str, str]) -> None:
    config = load([str(ROOT / "configs/eight_gpus.yaml"), f"--model.path={folders['7B']}"])
    wide = load(
        [
            str(ROOT / "configs/eight_gpus.yaml"),
            f"--model.path={folders['7B']}",
            "--learner.tokens_per_microbatch=24064",
        ]
    )
    (line,) = judge_price(wide, CARDS["H100"]).warnings
    fits = settle(config, CARDS["H100"].free).first.tokens
    assert line.startswith("learner.tokens_per_microbatch: 24,064 fills 91% of rank 0's H100, above the 90% that leave")
    assert line.endswith(f"auto takes {fits:,}") and 20_000 < fits < 24_064


def test_rank_0_of_eight_gpus_by_part(folders: dict[str, str]) -> None:
    """The figures of the issue: 28.4 GiB of copies to send on rank 0, none on the others."""
    found = forecast_of("H100", folders["7B"], str(ROOT / "configs/eight_gpus.yaml"))
    assert "28.4 copies to send + 14.2 optimizer + 7.1 weights + 7.1 gradients" in found.settled.first.describe()
    assert found.settled.others and "copies" not in found.settled.others.describe()
    text = "\n".join(judge_price(found.config, found.card).facts)
    assert "weights.publish: auto takes gather: no weights of " in text
    for part in ("memory of rank 0: ", "memory of each other rank: ", "memory of a server's GPU: 15.2 GB of weights"):
        assert part in text
    assert "set log.price_per_gpu_hour for the cost" in text


def test_on_several_nodes_the_ranks_that_hold_copies_are_named(folders: dict[str, str]) -> None:
    argv = [str(ROOT / "configs/eight_gpus.yaml"), "--learner.ranks=8", "--learner.nodes=2", "--weights.publish=rows"]
    config = load([*argv, f"--model.path={folders['1.5B']}"])
    text = "\n".join(judge_price(config, CARDS["H100"]).facts)
    assert re.search(r"^memory of each of ranks 0 to 3: .* copies to send", text, re.M)


def test_the_cost_follows_from_the_price(folders: dict[str, str]) -> None:
    found = forecast_of("H100", folders["7B"], str(ROOT / "configs/eight_gpus.yaml"), "--log.price_per_gpu_hour=2.5")
    text = "\n".join(judge_price(found.config, found.card).facts)
    hours = (found.seconds or 0) / 3600 * 8
    assert found.gpus == 8
    assert f"on 8 GPUs {hours:,.1f} GPU hours; costs {2.5 * hours:,.2f} at 2.5 an hour" in text


def test_a_mixture_s_step_is_within_20_percent_of_what_was_measured(folders: dict[str, str]) -> None:
    argv = [str(ROOT / "configs/two_gpus.yaml"), "--learner.share_prompts=false", "--learner.compile=true"]
    found = forecast_of("H200", folders["30B-A3B, 8 layers"], *argv)
    batch, answer = found.config.batch, mean_answer(found.config)
    tokens = batch.groups * batch.samples * (answer + MEAN_SHARE * found.config.data.max_prompt_tokens)
    assert found.speed and found.settled.learner.activation_checkpointing == "none"
    assert tokens / found.speed.train_s == pytest.approx(measured("experts", "ours-compiled: tokens/s"), rel=0.2)


def test_no_speed_is_known_in_float32(folders: dict[str, str]) -> None:
    config = load([str(ROOT / "configs/two_gpus.yaml"), f"--model.path={folders['1.5B']}", "--model.dtype=float32"])
    *_, line = judge_price(config, CARDS["H100"]).facts
    assert line == "speed and cost: not estimated, because no speed with model.dtype: float32 is known"


def test_servers_that_keep_the_learner_busy(folders: dict[str, str]) -> None:
    argv = [str(ROOT / "configs/two_gpus.yaml"), "--batch.groups=256", "--batch.max_staleness=4"]
    one = forecast_of("H100", folders["1.5B"], *argv)
    four = forecast_of("H100", folders["1.5B"], *argv, "--learner.ranks=4")
    assert one.speed and four.speed
    assert four.speed.train_s == pytest.approx(one.speed.train_s / 4)
    assert four.speed.servers > one.speed.servers
    assert four.speed.version_s >= 0.9 * max(four.speed.train_s, four.speed.batch_s)


def test_a_critic_costs_a_pass_and_a_step_of_its_own(folders: dict[str, str]) -> None:
    """A head to 150,000 words costs the policy more than a value head, and the passes through both models are alike."""
    argv = [str(ROOT / "configs/eight_gpus.yaml"), "--learner.activation_checkpointing=block"]
    plain, valued, twice = (
        forecast_of("H200", folders["7B"], *argv, *more)
        for more in ([], ["--algorithm.advantage=gae"], ["--algorithm.advantage=gae", "--algorithm.critic.updates=2"])
    )
    assert plain.speed and valued.speed and twice.speed
    one = twice.speed.train_s - valued.speed.train_s
    assert 0.8 * plain.speed.train_s < one < plain.speed.train_s
    assert valued.speed.train_s == pytest.approx(plain.speed.train_s + 4 / 3 * one)


@pytest.mark.parametrize(
    ("card", "model", "changes", "said"),
    long_but(
        [
            ("4090", "1.5B", (), ("a GPU has 23.0 GiB", "these fit: ", "model.lora: {rank: 32}", "--gpu A100-80G")),
            ("L4", "7B", ("--learner.ranks=4",), ("two copies of", "these fit: an adapter, model.lora: {rank: 32}")),
            ("H100", "7B", ("--learner.ranks=1",), ("learner.ranks: 4",)),
            (
                *("H100", "7B", ("--learner.ranks=4", "--algorithm.advantage=gae")),
                ("critic", "these fit: learner.ranks: 8; or algorithm.advantage: group_mean, without a critic"),
            ),
            (
                "H100",
                "7B",
                ("--learner.ranks=1", "--learner.tokens_per_microbatch=4096"),
                (" with learner.tokens_per",),
            ),
        ],
        0,
        2,
        3,
    ),
)
def test_what_does_not_fit_is_refused_with_what_fits(
    card: str, model: str, changes: tuple[str, ...], said: tuple[str, ...], folders: dict[str, str]
) -> None:
    config = load([str(ROOT / "configs/two_gpus.yaml"), f"--model.path={folders[model]}", *changes])
    refused = judge_price(config, CARDS[card]).refused
    assert refused and "\n" not in refused[0]
    assert all(any(word in line for line in refused) for word in said), refused


@pytest.mark.parametrize(
    ("card", "changes"),
    long_but(
        [
            ("H100", ("--learner.ranks=4", "--learner.gather=batch")),
            ("H100", ("--learner.ranks=1", "--batch.groups=1", "--batch.samples=2")),
            ("H100", ("--learner.ranks=4", "--learner.tokens_per_microbatch=1000000")),
            ("H100", ("--learner.ranks=2", "--learner.tokens_per_microbatch=4096", "--learner.gather=batch")),
            ("H100", ("--learner.ranks=2", "--algorithm.advantage=gae")),
        ],
        0,
        1,
    ),
)
def test_each_change_that_is_said_to_fit_is_valid_and_fits(
    card: str, changes: tuple[str, ...], folders: dict[str, str]
) -> None:
    argv = [str(ROOT / "configs/two_gpus.yaml"), f"--model.path={folders['7B']}", *changes]
    refused = "\n".join(judge_price(load(argv), CARDS[card]).refused)
    (found,) = re.findall("these fit: (.*)", refused)
    for change in found.split("; or "):
        larger, keys = re.search(r"--gpu (\S+)", change), re.findall(r"([a-z_]+\.[a-z_]+): ({.*?}|[^\s,]+)", change)
        changed = load([*argv, *(f"--{key}={value}" for key, value in keys)])
        check(changed, files=())
        assert forecast(changed, CARDS[larger[1] if larger else card]).settled, change
    assert "A100" not in found, "it has no more memory than an H100"


def test_a_server_without_room_for_one_sample_is_refused(folders: dict[str, str]) -> None:
    argv = [
        "--model.lora={rank: 32}",
        "--sampling.max_tokens=300000",
        "--learner.ranks=8",
        "--learner.cpu_offload=true",
    ]
    config = load([*NEEDED, f"--model.path={folders['7B']}", *argv])
    refused = [
        line for line in judge_price(config, CARDS["4090"]).refused if line.startswith("rollout.tensor_parallel")
    ]
    assert len(refused) == 1 and "and a sample may have 301,024; set it to " in refused[0]


def test_the_cards() -> None:
    for card in CARDS.values():
        assert (
            card.peak
            and card.bandwidth
            and card.free < card.total
            and card.source.startswith("https://www.nvidia.com/")
        )
    assert card_named("h100") is card_named("NVIDIA H100") is CARDS["H100"]
    assert card_named("RTX 4090") is card_named("rtx-4090") is CARDS["4090"]
    assert card_named("A100") is card_named("A100-80GB") is CARDS["A100-80G"]
    with pytest.raises(ConfigError, match="did you mean H100"):
        card_named("H1000")
    with pytest.raises(ConfigError, match="Known: B200, H200"):
        card_named("")


@pytest.mark.parametrize(
    ("name", "mib", "card"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40G"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80G"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100"),
        ("NVIDIA GeForce RTX 4090", 24564, "4090"),
        ("NVIDIA L4", 23034, "L4"),
        ("NVIDIA L40S", 46068, "L40S"),
    ],
)
def test_cards_by_the_driver_s_name(name: str, mib: int, card: str) -> None:
    found = card_of(name, mib * MIB)
    assert found is CARDS[card] and peak(name) == found.peak


def test_without_a_card_the_command_says_how_to_ask(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = load([*NEEDED, f"--model.path={tmp_path}"])
    (line,) = judge_price(config, None).facts
    assert line.startswith("GPU memory, speed and cost: this machine has no GPU") and "--gpu H100" in line
    assert judge_price(load([*NEEDED, "--model.path=m", "--learner.device=cpu"]), None).facts == []
    for command in (main, doctor_main):
        with pytest.raises(SystemExit) as end:
            command(["--gpu", "H1000", *NEEDED, "--model.path=m"])
        assert end.value.code == 2
        assert "--gpu: 'H1000' is no card that is known here; did you mean H100?" in capfd.readouterr().err
    assert doctor_main(["--gpu", "H100"]) == 2


def test_a_model_that_cannot_be_read_has_no_price(tmp_path: Path) -> None:
    (line,) = judge_price(load([*NEEDED, f"--model.path={tmp_path}"]), CARDS["H100"]).facts
    assert line.startswith("GPU memory, speed and cost: not known, because of model.path: ")


def running(config: Config, *flags: str, **variables: str) -> Iterator[str]:
    command, environment = [sys.executable, "-m", "actors.doctor.price", *flags], os.environ | variables
    done = subprocess.run(command, input=dump(config), capture_output=True, text=True, cwd=ROOT, env=environment)
    yield from (str(done.returncode), done.stdout, done.stderr)


@pytest.mark.long
def test_the_process_judges_what_it_gets(folders: dict[str, str]) -> None:
    config = load([str(ROOT / "configs/two_gpus.yaml"), f"--model.path={folders['1.5B']}"])
    code, out, _ = running(config, "--gpu", "H100")
    assert code == "0" and re.search(r"^memory of the learner: [\d.]+ GiB = ", out, re.M)
    code, out, error = running(config, "--gpu", "4090")
    assert code == "2" and not out and "these fit: " in error


@pytest.mark.long
def test_a_model_with_a_hub_name_has_a_speed_too(folders: dict[str, str], tmp_path: Path) -> None:
    cached = tmp_path / "hub/models--some--model"
    shutil.copytree(folders["1.5B"], cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    hub = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    given = [str(ROOT / "configs/two_gpus.yaml"), "--log.price_per_gpu_hour=2"]
    named, foldered = ([*given, f"--model.path={path}"] for path in ("some/model", folders["1.5B"]))
    _, out, error = running(load(named), "--gpu", "H100", **hub)
    assert out.splitlines() == judge_price(load(foldered), CARDS["H100"]).facts, error
