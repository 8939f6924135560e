"""Checkpoints of adapters: only the adapter is in them, resuming is exact, no other base or adapter takes them; what
peft loads of them; whole weights made of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from configs.checkpoint_files import OWN_SUM, complete, folder_of, sum_of
from configs.load import ConfigError
from configs.schema import LoraConfig, ModelConfig
from learner.__main__ import main
from learner.checkpoint import Checkpoints
from learner.model.lora.base import digest
from learner.saved import adapter_files, export
from learner.saved.manifest import adapter_of
from learner.train.optimizer import Optimizer
from tests.harness import rank, world
from tests.harness.adapters import LORA, adapted_model, peft_model, stir
from tests.harness.pictured import seeing_model
from tests.harness.tiny_experts import tiny_experts
from tests.harness.world import LEARNER, plain, policy_of, tiny_model

IDS = torch.arange(40).reshape(2, 20)


def checkpoints_of(folder: Path, model: ModelConfig, mesh, **options):
    """A policy and its checkpoints in `folder`, saved every second version."""
    policy = policy_of(model, mesh, **options)
    learner = LEARNER.model_copy(update={"checkpoint_every": 2})
    return policy, Checkpoints(folder / "checkpoints", model, learner, Optimizer(policy, learner, 10), 10)


def saved(folder: Path, mesh, tied: bool = False, **options) -> tuple[ModelConfig, Path, dict[str, torch.Tensor]]:
    """A model, a checkpoint of version 2 with a stirred adapter, and that adapter."""
    model = adapted_model(folder / "model", tied, **options)
    policy, checkpoints = checkpoints_of(folder, model, mesh)
    stir(policy)
    checkpoints.save(policy, 2)
    checkpoints.close()
    return model, folder_of(folder / "checkpoints", 2), {name: x.clone() for name, x in policy.adapter()}


def test_resumed_is_uninterrupted(tmp_path: Path, mesh) -> None:
    """Bit for bit: metrics, the adapter, and thereby the optimizer's state."""
    tiny_model(tmp_path / "a" / "model", tied=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    options = {"lora": LORA.model_dump()}
    whole = rank.run(tmp_path / "a", mesh, 0, 0, 5, [24], **options)
    first = rank.run(tmp_path / "b", mesh, 0, 0, 3, [24], **options)
    again = rank.run(tmp_path / "b", mesh, 0, 2, 5, [24], **options)
    assert whole["records"] == first["records"][:2] + again["records"]
    assert all(torch.equal(x, again["weights"][name]) for name, x in whole["weights"].items())


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_across_numbers_of_ranks(tmp_path: Path, mesh) -> None:
    """Two ranks write, one goes on; the head is tied, and is not written."""
    tiny_model(tmp_path / "a" / "model", tied=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    options = {"lora": LORA.model_dump()}
    whole = rank.run(tmp_path / "a", mesh, 0, 0, 4, [24], **options)
    world.together("train", 2, tmp_path / "b", start=0, stop=2, cuts=[10, 14], name="first", **options)
    last = rank.run(tmp_path / "b", mesh, 0, 2, 4, [24], **options)
    assert len(whole["weights"]) == 28
    for name, tensor in whole["weights"].items():
        assert (last["weights"][name] - tensor).norm() < 1e-3 * tensor.norm(), name
    for got, want in zip(last["records"], whole["records"][2:], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-3, abs=1e-5)


def test_only_the_adapter_is_written(tmp_path: Path, mesh) -> None:
    _, checkpoint, adapter = saved(tmp_path, mesh, tied=True)
    written = FileSystemReader(checkpoint / "state").read_metadata().state_dict_metadata
    weights = {name for name in written if name.startswith("model.")}
    assert weights == {f"model.{name.removesuffix('.weight')}" for name in adapter}
    moments = [name for name in written if name.endswith("exp_avg")]
    assert len(moments) == len(adapter) == 28
    assert not (checkpoint / "huggingface").exists()


def test_another_base_is_refused(tmp_path: Path, mesh) -> None:
    model, checkpoint, adapter = saved(tmp_path, mesh)
    same = model.model_copy(update={"path": str(tmp_path / "elsewhere")})
    shutil.copytree(model.path, same.path)
    policy, moved = checkpoints_of(tmp_path, same, mesh)
    assert moved.restore(policy) == 2  # a folder may move
    assert all(torch.equal(adapter[name], x) for name, x in policy.adapter())
    moved.close()
    changed = plain(model)
    with torch.no_grad():
        changed.model.norm.weight[3] += 0.01
    changed.save_pretrained(same.path)
    policy, other = checkpoints_of(tmp_path, same, mesh)
    with pytest.raises(ConfigError) as error:
        other.restore(policy)
    assert str(error.value) == (
        f"model.path: {same.path} has other weights, or model.dtype is another, than when {checkpoint} was written; "
        "give it back what it had, or begin another run"
    )
    other.close()


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_another_base_is_refused_by_all_nodes(tmp_path: Path, mesh) -> None:
    """Also by those that read nothing, which would wait for what the others restore."""
    model, checkpoint, _ = saved(tmp_path, mesh)
    changed = plain(model)
    with torch.no_grad():
        changed.model.norm.weight[3] += 0.01
    changed.save_pretrained(model.path)
    world.together("other_base", 2, tmp_path, lora=LORA.model_dump())
    said = {(tmp_path / f"refused-{number}.txt").read_text() for number in range(2)}
    assert len(said) == 1 and f"has other weights, or model.dtype is another, than when {checkpoint}" in said.pop()


@pytest.mark.xdist_group("ranks")
def test_a_manifest_of_another_release_is_refused_by_all_nodes(tmp_path: Path, mesh) -> None:
    """Rank 0 alone reads it, and its files are all there."""
    _, checkpoint, _ = saved(tmp_path, mesh)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["adapter"]["model"]["tomorrow"] = 1
    del manifest[OWN_SUM]
    manifest[OWN_SUM] = sum_of(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    world.together("other_base", 2, tmp_path, lora=LORA.model_dump())
    said = {(tmp_path / f"refused-{number}.txt").read_text() for number in range(2)}
    assert said == {
        f"{checkpoint}/manifest.json: adapter.model.tomorrow: Extra inputs are not permitted; install the Headrace "
        f"that wrote it, or remove {checkpoint}: the run goes on from the one before"
    }


@pytest.mark.parametrize(
    "lora", [None, LoraConfig(rank=2), LoraConfig(rank=4, alpha=4), {"targets": ["q_proj"]}], ids=str
)
def test_another_adapter_is_refused(tmp_path: Path, mesh, lora) -> None:
    model, _, _ = saved(tmp_path, mesh)
    lora = LORA.model_copy(update=lora) if isinstance(lora, dict) else lora
    policy, checkpoints = checkpoints_of(tmp_path, model.model_copy(update={"lora": lora}), mesh)
    with pytest.raises(ConfigError, match=r"model.lora: .*v000002 is of .*\"rank\": 4, \"alpha\": 8.*undo that"):
        checkpoints.restore(policy)
    checkpoints.close()


def test_whole_weights_are_refused_as_an_adapter(tmp_path: Path, mesh) -> None:
    model = tiny_model(tmp_path / "model")
    policy, checkpoints = checkpoints_of(tmp_path, model, mesh)
    checkpoints.save(policy, 2)
    checkpoints.close()
    policy, again = checkpoints_of(tmp_path, model.model_copy(update={"lora": LORA}), mesh)
    with pytest.raises(ConfigError, match=r"v000002 is of null"):
        again.restore(policy)
    again.close()
    assert main(["merge", str(folder_of(tmp_path / "checkpoints", 2)), str(tmp_path / "out")]) == 2


def test_finish_takes_the_last_one_as_it_is(tmp_path: Path, mesh) -> None:
    """It has an export already, and is not written again."""
    model, checkpoint, _ = saved(tmp_path, mesh)
    before = (checkpoint / "manifest.json").stat().st_mtime_ns
    policy, checkpoints = checkpoints_of(tmp_path, model, mesh)
    assert checkpoints.restore(policy) == 2
    checkpoints.finish(policy, 2)
    checkpoints.close()
    assert (checkpoint / "manifest.json").stat().st_mtime_ns == before and complete(checkpoint.parent) == [2]


@pytest.mark.parametrize("lora", [LORA, LoraConfig(rank=2, targets=["o_proj", "up_proj"])], ids=str)
def test_peft_loads_it(tmp_path: Path, mesh, lora: LoraConfig) -> None:
    """To equal logits, with the names and settings that peft itself writes."""
    model, checkpoint, adapter = saved(tmp_path, mesh, lora=lora)
    loaded = PeftModel.from_pretrained(plain(model), str(checkpoint / "adapter"))
    made = peft_model(model, adapter)
    assert torch.equal(loaded(IDS).logits, made(IDS).logits)
    assert (loaded(IDS).logits - plain(model)(IDS).logits).abs().max() > 0.01
    made.save_pretrained(tmp_path / "theirs")
    folders = checkpoint / "adapter", tmp_path / "theirs"
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], x) for name, x in theirs.items())
    mine, wanted = (json.loads((folder / "adapter_config.json").read_text()) for folder in folders)
    for name in ("peft_type", "r", "lora_alpha", "bias", "lora_dropout"):
        assert mine[name] == wanted[name], name
    assert mine["target_modules"] == sorted(wanted["target_modules"])


def test_peft_loads_that_of_a_vision_language_model(tmp_path: Path, mesh) -> None:
    """Whose tower has layers of the same last words."""
    model = seeing_model(tmp_path / "model", "qwen2_5_vl").model_copy(update={"lora": LORA})
    policy = policy_of(model, mesh)
    stir(policy)
    adapter_files.write(export.collect(policy), model, tmp_path / "adapter")
    base = AutoModelForImageTextToText.from_pretrained(model.path)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    got = {name for name, _ in loaded.named_parameters() if "lora_" in name}
    assert len(got) == len(list(policy.adapter())) and not any("visual" in name for name in got)
    tokens = list(range(7, 27))
    logp = loaded(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    want = logp.gather(-1, torch.tensor(tokens)[1:, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor(policy.logprobs_of(tokens)), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_merged_is_the_model_with_its_adapter(tmp_path: Path, mesh, tied: bool, capsys) -> None:
    model, checkpoint, adapter = saved(tmp_path, mesh, tied)
    out = tmp_path / "merged"
    assert main(["merge", str(checkpoint), str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"vllm serve {out}"
    merged = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    torch.testing.assert_close(merged(IDS).logits, peft_model(model, adapter)(IDS).logits, rtol=1e-4, atol=1e-4)
    names = {name for file in out.glob("*.safetensors") for name in load_file(file)}
    assert names == plain(model).state_dict().keys() - ({"lm_head.weight"} if tied else set())
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) is tied


def test_merged_experts_are_files_as_other_models_have_them(tmp_path: Path, mesh) -> None:
    """An adapter of attention: experts one by one, unchanged, as a full run exports them and vLLM knows them."""
    path = tiny_experts(tmp_path / "model")
    model = ModelConfig(path=str(path), dtype="float32", lora=LORA)
    policy, checkpoints = checkpoints_of(tmp_path, model, mesh)
    stir(policy)
    checkpoints.save(policy, 2)
    checkpoints.close()
    assert main(["merge", str(folder_of(tmp_path / "checkpoints", 2)), str(tmp_path / "merged")]) == 0
    ours, theirs = (
        {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
        for folder in (tmp_path / "merged", path)
    )
    assert ours.keys() == theirs.keys()
    changed = {name.split(".")[-3] for name in ours if not torch.equal(ours[name], theirs[name])}
    assert changed == {"self_attn"}


def test_merging_rounds_once(tmp_path: Path, mesh) -> None:
    model, checkpoint, adapter = saved(tmp_path, mesh, dtype=torch.bfloat16)
    assert main(["merge", str(checkpoint), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    base, layer = plain(model).state_dict(), "model.layers.1.mlp.down_proj"
    change = 2.0 * (adapter[f"{layer}.lora_B.weight"].double() @ adapter[f"{layer}.lora_A.weight"].double())
    want = base[f"{layer}.weight"].double() + change
    got = merged[f"{layer}.weight"]
    assert got.dtype == torch.bfloat16 and (got == want.float().bfloat16()).float().mean() > 0.999
    assert torch.equal(merged["model.norm.weight"], base["model.norm.weight"])


def test_what_cannot_be_merged_is_refused(tmp_path: Path, mesh, capsys) -> None:
    model, checkpoint, _ = saved(tmp_path, mesh)

    def refused(*words: Path) -> str:
        assert main(["merge", *map(str, words)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("python -m learner merge: ")

    assert refused(checkpoint, tmp_path) == f"{tmp_path}: exists already; name a folder that does not"
    assert "is no complete checkpoint: manifest.json cannot be read" in refused(tmp_path / "none", tmp_path / "out")
    changed = plain(model)
    with torch.no_grad():
        changed.lm_head.weight[5] += 1
    changed.save_pretrained(model.path)
    says = f"model.path: {model.path} has other weights than when {checkpoint} was saved; give them back"
    assert refused(checkpoint, tmp_path / "out") == says
    shutil.rmtree(model.path)
    assert model.path in refused(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_manifest_says_what_the_adapter_is_of(tmp_path: Path, mesh) -> None:
    model, checkpoint, _ = saved(tmp_path, mesh)
    known = adapter_of(checkpoint)
    assert known is not None and known.model == model
    assert known.base == digest(plain(model).requires_grad_(False))


def test_a_merge_to_a_place_that_cannot_be_written_ends_before_it_reads(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "merged"
    assert main(["merge", str(tmp_path / "v000002"), str(out)]) == 2
    problem = f"{out}: {tmp_path / 'file'} cannot be written to; name another folder"
    assert capsys.readouterr().err == f"python -m learner merge: {problem}\n"
