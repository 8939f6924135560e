"""Random Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Gemma 3 models of under a million parameters, with tokenizer and processor.

model = tiny_vlm(folder, "qwen3_vl")              transformers' model, float32; its folder is `folder`
tiny_vlm(folder, "qwen2_5_vl", seed=1)            other weights of the same shapes
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3")
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_5": 16, "gemma3": 14}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789?.,:<>/="
WORDS = ["red", "green", "blue", "gold", "user", "assistant", "which", "colours", "what"]
PART = (
    "{% if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}" + PART + "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LINES = ["\n\n\n\n", "\n\n\n", "\n\n"]
"""Tokens that vLLM looks for in Gemma 3's tokenizer."""
SQUARE_TOKENS = {"boi": "vision_start", "eoi": "vision_end", "image": "image_pad"}
CLASSES = {
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "qwen3_5": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}


def tiny_vlm(
    folder: Path,
    kind: str,
    *,
    seed: int = 0,
    tied: bool = True,
    width: int = 128,
    layers: int = 3,
    depth: int = 3,
    deviation: float = 0.02,
    patch: int | None = None,
    state: int = 32,
) -> PreTrainedModel:
    """Make the folder; `deviation` is the standard deviation of the weights, `patch` the side of a patch in pixels,
    `state` the size of a head of Qwen3.5's layers that keep a state: vLLM takes 128 on a CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, patch = tiny_tokenizer(kind), patch or PATCH[kind]
    shape = _gemma3 if kind == "gemma3" else _config
    config = AutoConfig.for_model(kind, **shape(kind, tokenizer, tied, width, layers, depth, deviation, patch, state))
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    if kind == "gemma3":  # transformers begins with zeros, with which a model sees nothing
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=deviation)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, content in (_square_files if kind == "gemma3" else _processor_files)(kind, patch).items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    return model


def _processor_files(kind: str, patch: int) -> dict[str, Any]:
    factor, (processor, video) = 2 * patch, CLASSES[kind]
    both: dict[str, Any] = {"patch_size": factor // 2, "merge_size": 2, "temporal_patch_size": 2}
    both |= {
        "size": {"shortest_edge": factor**2, "longest_edge": 64 * factor**2},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return {
        "preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessor", **both},
        "video_preprocessor_config": {
            "video_processor_type": video,
            **both,
            "min_frames": 2,
            "max_frames": 4,
            "fps": 2,
        },
        "processor_config": {"processor_class": processor},
    }


def _square_files(kind: str, patch: int) -> dict[str, Any]:
    images: dict[str, Any] = {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": None}
    images |= {"size": {"height": 4 * patch, "width": 4 * patch}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return {
        "preprocessor_config": images | {"processor_class": "Gemma3Processor"},
        "processor_config": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    }


def tiny_tokenizer(kind: str = KINDS[0]) -> PreTrainedTokenizerFast:
    """A token for each special token, character and colour: 64 at most."""
    marked = "<|vision_start|><|image_pad|><|vision_end|>"
    own: dict[str, Any] = {}
    characters, words = CHARACTERS, WORDS
    if kind == "gemma3":  # its processor puts the rest, and new lines, around the mark of the template
        characters, words = CHARACTERS.replace("789", ""), [*LINES, *WORDS]
        own["model_specific_special_tokens"] = {f"{key}_token": f"<|{name}|>" for key, name in SQUARE_TOKENS.items()}
    template = TEMPLATE.replace(marked, "<|vision_start|>") if own else TEMPLATE
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters, *words, "[UNK]"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(words) + r"|[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="[UNK]",
        extra_special_tokens=SPECIAL,
        chat_template=template,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        **own,
    )


def _text(tokenizer: PreTrainedTokenizerFast, tied: bool, width: int, layers: int, deviation: float) -> dict[str, Any]:
    """The keys of a text model that all kinds have."""
    return {
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "initializer_range": deviation,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _config(
    kind: str,
    tokenizer: PreTrainedTokenizerFast,
    tied: bool,
    width: int,
    layers: int,
    depth: int,
    deviation: float,
    patch: int,
    state: int,
) -> dict[str, Any]:
    names = {
        "image_token_id": "image_pad",
        "video_token_id": "video_pad",
        "vision_start_token_id": "vision_start",
        "vision_end_token_id": "vision_end",
    }
    sections = {"qwen2_5_vl": [4, 6, 6], "qwen3_vl": [6, 5, 5], "qwen3_5": [3, 3, 2]}[kind]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    text = _text(tokenizer, tied, width, layers, deviation) | {"rope_parameters": rope}
    vision: dict[str, Any] = {
        "depth": depth,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "initializer_range": deviation,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": width,
    }
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 8 * patch, "fullatt_block_indexes": [depth - 1]}
    else:
        text |= {"head_dim": 32}
        rope["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": 64}
    if kind == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0, 1]}
    if kind == "qwen3_5":
        rope["partial_rotary_factor"] = 0.5
        text |= {"layer_types": [*["linear_attention"] * (layers - 1), "full_attention"]}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": state, "linear_value_head_dim": state}
    ids = {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied, **ids}


def _gemma3(
    kind: str,
    tokenizer: PreTrainedTokenizerFast,
    tied: bool,
    width: int,
    layers: int,
    depth: int,
    deviation: float,
    patch: int,
    state: int,
) -> dict[str, Any]:
    """Images of 2 x 2 tokens and a sliding window of 16; every second layer sees the whole document."""
    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    text = _text(tokenizer, tied, width, layers, deviation)
    text |= {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "layer_types": kinds}
    vision: dict[str, Any] = {
        "num_hidden_layers": depth,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "patch_size": patch,
        "image_size": 4 * patch,
        "vision_use_head": False,
    }
    ids = {f"{key}_token_index": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in SQUARE_TOKENS.items()}
    more = {"mm_tokens_per_image": 4, "initializer_range": deviation, "tie_word_embeddings": tied}
    return {"text_config": text, "vision_config": vision, **more, **ids}
