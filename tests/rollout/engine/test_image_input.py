"""The real vLLM on tiny models that see images: its log-probabilities against transformers' own forward pass.

The whole scenario is played once for each architecture; each test looks at one aspect.
"""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from buffer.data.images import ImageFormat, decode
from rollout.episodes.prompts import Prompts, load_tokenizer
from rollout.episodes.sampler import Sampler
from rollout.tasks import Trajectory
from rollout.tasks.trajectory import PlacedImage
from tests.harness.engines import vision_config
from tests.harness.tiny_vlm import encoded, picture, tiny_vlm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ROWS = {
    "one": {"problem": "<image>what colours?", "images": [(56, 56)]},
    "odd": {"problem": "which red? <image> what", "images": [(75, 131)]},
    "two": {"problem": "<image>red <image>blue?", "images": [(60, 61), (201, 40)]},
    "same twice": {"problem": "<image><image>?", "images": [(90, 90), (90, 90)]},
    "text": {"problem": "what colours? red green blue gold"},
    "shrunk": {"problem": "<image>?", "images": [(900, 700)]},
    "long": {"problem": f"<image>{'what colours? ' * 12}", "images": [(100, 100)]},
}


def make_model(folder, kind, seed):
    model = tiny_vlm(folder, kind, seed=seed, deviation=0.1).eval()
    model.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return model


@torch.no_grad()
def scores(model, tokens, images, sampled=()):
    """Log-probabilities of `tokens[1:]` by transformers, which merges images by token id: where the policy `sampled`
    an image token, another one stands, with the image token's embedding."""
    ids, token = torch.tensor([tokens]), model.config.image_token_id
    text = torch.tensor([[place in sampled for place in range(len(tokens))]]) & (ids == token)
    extra = {"mm_token_type_ids": ((ids == token) & ~text).long()}
    if images:
        extra |= model.processor([Image.fromarray(image.picture.pixels) for image in images], return_tensors="pt")

    def embedded(layer, arguments, output):
        return torch.where(text[..., None], layer.weight[token], output)

    with model.get_input_embeddings().register_forward_hook(embedded):
        logits = model(ids.masked_fill(text, 0), **extra).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def difference(ours, theirs):
    """Largest absolute difference."""
    assert ours
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


async def play(engine, folder, kind):
    """The scenario; returns what happened."""
    model = make_model(folder, kind, seed=0)
    config = vision_config(folder, kind)
    form = ImageFormat.of(str(folder), config.data)
    prompts = Prompts(load_tokenizer(config), config, form)
    sampler = Sampler(engine, prompts, 1.0, 100, 400, form, 8)
    seen = SimpleNamespace(form=form)
    await engine.load_folder(folder)
    seen.first = await one_round(sampler, model)
    seen.again = await one_round(sampler, model)
    other = make_model(folder / "other", kind, seed=1)
    await engine.load_folder(folder / "other")
    seen.other = await one_round(sampler, other)
    seen.apart = await apart(sampler, model)
    await engine.load_folder(folder)
    engine.version = 1
    seen.back = await one_round(sampler, model)
    seen.turns = await turns(sampler, model, seen)
    return seen


def row_of(name):
    images = [encoded(picture(*size)) for size in ROWS[name].get("images", ())]
    return {"problem": ROWS[name]["problem"], "images": images}


async def one_round(sampler, model):
    """Each row answered three times and probed, beside all others: the largest differences."""
    problems = {name: sampler.problem(row_of(name)) for name in ROWS}

    async def answered(problem):
        generate = sampler.generate_for(problem)
        completions = await asyncio.gather(*(generate(problem.prompt, max_tokens=12) for _ in range(3)))
        return completions, await sampler.engine.probe(problem.prompt, problem.images)

    answers, found = await asyncio.gather(*map(answered, problems.values())), {}
    for (name, problem), (completions, probed) in zip(problems.items(), answers, strict=True):
        found[name] = [difference(c.logprobs, sampled_scores(model, problem, c.tokens)) for c in completions]
        found[f"{name}, probed"] = [difference(probed, scores(model, problem.prompt, problem.images))]
    return found


def sampled_scores(model, problem, tokens):
    start = len(problem.prompt)
    whole = problem.prompt + tokens
    return scores(model, whole, problem.images, range(start, len(whole)))[start - 1 :]


async def apart(sampler, model):
    """How far the probe is from a model with other weights, and from one that sees another image."""
    problem, wrong = (
        sampler.problem(row_of("one")),
        sampler.problem(row_of("one") | {"images": [encoded(picture(56, 56, 9))]}),
    )
    probed = await sampler.engine.probe(problem.prompt, problem.images)
    elsewhere = await sampler.engine.probe(wrong.prompt, wrong.images)
    return difference(probed, scores(model, problem.prompt, problem.images)), difference(probed, elsewhere)


async def turns(sampler, model, seen):
    """A second and third turn with an image each, after image tokens that the policy sampled."""
    problem, token = sampler.problem(row_of("odd")), seen.form.image_token

    async def played(seed):
        generate, trajectory = sampler.generate_for(problem), Trajectory(problem.prompt)
        first = await generate(trajectory.tokens, max_tokens=60)
        trajectory.take(first)
        trajectory.show(encoded(picture(70 + seed, 50, seed)), problem)
        trajectory.give([10, 11])
        trajectory.take(await generate(trajectory.tokens, max_tokens=60, images=trajectory.images))
        trajectory.show(picture(30, 64, seed), problem)
        trajectory.take(await generate(trajectory.tokens, max_tokens=20, images=trajectory.images))
        sampler.check(problem, trajectory)
        return trajectory

    found, seen.sampled_images = [], 0
    for trajectory in await asyncio.gather(*map(played, range(8))):
        seen.sampled_images += sum(s and t == token for s, t in zip(trajectory.sampled, trajectory.tokens, strict=True))
        mine = [place for place, own in enumerate(trajectory.sampled) if own]
        images = [*problem.images, *trajectory.images]
        theirs = scores(model, trajectory.tokens, images, mine)
        found.append(difference([trajectory.logprobs[p] for p in mine], [theirs[p - 1] for p in mine]))
    return found


@pytest.fixture(scope="module")
def seen(vision_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return vision_engine.play(lambda engine: play(engine, folder, vision_engine.kind))


@pytest.mark.parametrize("loaded", ["first", "again", "other", "back"])
def test_vllm_computes_what_transformers_computes(seen, loaded):
    worst = {name: max(differences) for name, differences in getattr(seen, loaded).items()}
    assert max(worst.values()) < 1e-4, worst


def test_other_weights_and_another_image_are_seen(seen):
    assert min(seen.apart) > 0.05


def test_images_in_later_turns_and_image_tokens_that_the_policy_sampled(seen):
    assert seen.sampled_images > 0
    assert max(seen.turns) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_patches_are_in_the_tower_s_dtype_as_if_they_were_cast(dtype):
    from rollout.engine.image_input import image_input

    form = ImageFormat("qwen2_5_vl", 14, 2, 2, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28), 784, 78400, 5, 3, 4)
    shown = decode(encoded(picture(75, 131)), form)
    (made,) = image_input([1, 5, 6], [PlacedImage(1, shown)], "1", "1", dtype)["mm_kwargs"]["image"]
    patches = made["pixel_values"].data
    assert patches.dtype == dtype and patches.is_contiguous()
    assert torch.equal(patches, torch.from_numpy(shown.patches()).to(dtype))


def test_an_image_of_one_size_is_what_gemma_3_s_processor_makes_of_it():
    from rollout.engine.image_input import image_input

    form = ImageFormat("gemma3", 14, 2, 1, *[(0.5, 0.5, 0.5)] * 2, 3136, 3136, 5, 3, 4, side=56)
    shown = decode(encoded(picture(75, 131)), form)
    made = image_input([1, 3, 5, 5, 5, 5, 4], [PlacedImage(2, shown)], "1", "1", torch.bfloat16)
    (image,), (place,) = made["mm_kwargs"]["image"], made["mm_placeholders"]["image"]
    assert torch.equal(image["pixel_values"].data, torch.from_numpy(shown.planes())[None].bfloat16())
    assert image["num_patches"].data == 1 and (place.offset, place.length) == (2, 4)


def test_what_the_tower_made_is_used_again_only_where_policies_leave_the_tower_as_it_is():
    from rollout.engine.scheduling.scheduler import Reports
    from rollout.engine.vllm_engine import Engine

    form = ImageFormat("qwen2_5_vl", 14, 2, 2, *[(0.5, 0.5, 0.5)] * 2, 784, 78400, 5, 3, 4)
    image = PlacedImage(1, decode(encoded(picture(56, 56)), form))

    def keys(engine):
        made = engine._input([1, 5, 5, 5, 5, 6], [image], engine.salt)
        return made["mm_hashes"]["image"][0], made["cache_salt"]

    for frozen in (False, True):
        engine = Engine(SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32)), Reports(), None)
        engine.tower_frozen = frozen
        seen = [keys(engine)]
        for version in (1, 2, 1):  # a learner fell back, and its second version 1 is another
            engine.version = version
            seen.append(keys(engine))
        assert len({salt for _, salt in seen}) == 4
        assert len({name for name, _ in seen}) == (1 if frozen else 4)
