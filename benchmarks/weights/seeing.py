"""Vision-language shapes for benchmarks: what a model's folder holds beside weights and tokenizer. Pure data.

Qwen2.5-VL-3B, Qwen3.5-2B-VL and Gemma-3-4B have the sizes of the public models; the cut one has 20 of 34 text layers,
so that a learner of one GPU of 80 GB holds it. The specks are their architectures and Qwen3-VL's, for CPU.
"""

from typing import Any

from benchmarks.weights.family_shapes import FAMILIES, QWEN35_TEXT

SPECIAL_WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL_KEYS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
"""The keys of `config.json` under which their ids stand, in the same order."""
SQUARE_KEYS = ("boi_token_index", "eoi_token_index", "image_token_index")
"""The keys of Gemma 3, whose images are squares of one size; it has none for videos."""
VIDEO_PROCESSORS = {"qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
                    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
                    "qwen3_5": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor")}  # fmt: skip
ARCHITECTURES = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration",
                 "qwen3_5": "Qwen3_5ForConditionalGeneration",
                 "gemma3": "Gemma3ForConditionalGeneration"}  # fmt: skip

SPECK_TEXT: dict[str, Any] = {
    "vocab_size": 32768, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
SPECK_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.1,
}  # fmt: skip


def rope(theta: float, sections: list[int], **more: Any) -> dict[str, Any]:
    """`rope_parameters` of a text model whose positions have three parts."""
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, **more}


GEMMA3: dict[str, Any] = {
    "model_type": "gemma3", "vision_config": FAMILIES["Gemma-3-4B"]["vision_config"],
    "tokens": 256, "first_special": 262144, "photos": (256, 256),
    "mean_std": ([0.5] * 3, [0.5] * 3), "pixels": (896**2, 896**2),
}  # fmt: skip
SEEING: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-3B": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6, "rope_parameters": rope(1e6, [16, 24, 24]),
        },
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "first_special": 151652, "photos": (300, 1000),
        "mean_std": ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
        "pixels": (3136, 12845056),
    },
    "Gemma-3-4B-images": GEMMA3 | {"text_config": FAMILIES["Gemma-3-4B"]["text_config"]},
    "Gemma-3-4B-cut-images": GEMMA3 | {"text_config": FAMILIES["Gemma-3-4B-cut"]["text_config"]},
    "speck-gemma-3-images": {
        "model_type": "gemma3",
        "text_config": {**SPECK_TEXT, "initializer_range": 0.1, "head_dim": 32, "sliding_window": 32,
                        "query_pre_attn_scalar": 32},
        "vision_config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                          "patch_size": 14, "image_size": 224, "vision_use_head": False},
        "tokens": 16, "first_special": 32000, "photos": (16, 16),
        "mean_std": ([0.5] * 3, [0.5] * 3),
        "pixels": (224**2, 224**2),
    },
    "Qwen3.5-2B-VL": {
        "model_type": "qwen3_5",
        "text_config": {**FAMILIES["Qwen3.5-2B"]["text_config"],
                        "rope_parameters": rope(1e7, [11, 11, 10], mrope_interleaved=True, partial_rotary_factor=0.25)},
        "vision_config": {**FAMILIES["Qwen3.5-2B"]["vision_config"], "patch_size": 16, "spatial_merge_size": 2,
                          "temporal_patch_size": 2, "num_position_embeddings": 2304},
        "first_special": 248053, "photos": (300, 1000),
        "mean_std": ([0.5] * 3, [0.5] * 3),
        "pixels": (65536, 16777216),
    },
    "speck-2.5-VL": {
        "model_type": "qwen2_5_vl",
        "text_config": {**SPECK_TEXT, "initializer_range": 0.1, "rope_parameters": rope(1e4, [4, 6, 6])},
        "vision_config": {**SPECK_VISION, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
        "first_special": 32000, "photos": (12, 48),
        "mean_std": ([0.5] * 3, [0.5] * 3),
        "pixels": (28 * 28, 64 * 28 * 28),
    },
    "speck-3-VL": {
        "model_type": "qwen3_vl",
        "text_config": {**SPECK_TEXT, "initializer_range": 0.1, "head_dim": 32,
                        "rope_parameters": rope(1e4, [6, 5, 5], mrope_interleaved=True)},
        "vision_config": {**SPECK_VISION, "patch_size": 16, "num_position_embeddings": 64,
                          "deepstack_visual_indexes": [0, 1]},
        "first_special": 32000, "photos": (12, 48),
        "mean_std": ([0.5] * 3, [0.5] * 3),
        "pixels": (32 * 32, 64 * 32 * 32),
    },
    "speck-3.5-VL": {
        "model_type": "qwen3_5",
        "text_config": {**QWEN35_TEXT, **SPECK_TEXT, "initializer_range": 0.1, "num_hidden_layers": 4, "head_dim": 32,
                        "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                        "rope_parameters": rope(1e4, [2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)},
        "vision_config": {**SPECK_VISION, "patch_size": 16, "num_position_embeddings": 64},
        "first_special": 32000, "photos": (12, 48),
        "mean_std": ([0.5] * 3, [0.5] * 3),
        "pixels": (32 * 32, 64 * 32 * 32),
    },
}  # fmt: skip
"""`text_config` and `vision_config` as in `config.json`; `first_special`: id of the first of SPECIAL_WORDS; `photos`:
fewest and most tokens of the images that its benchmarks show; `tokens`: of each image, where all have as many."""


def special_ids(shape: str) -> dict[str, int]:
    """The special words by their ids' keys in `config.json`."""
    first, keys = SEEING[shape]["first_special"], SQUARE_KEYS if "tokens" in SEEING[shape] else SPECIAL_KEYS
    return {key: first + number for number, key in enumerate(keys)}


def config_of(shape: str, end: int) -> dict[str, Any]:
    """Keyword arguments of transformers' config. `end`: the token that ends an answer."""
    given = SEEING[shape]
    text = {"bos_token_id": None, "eos_token_id": end, "tie_word_embeddings": True, **given["text_config"]}
    sizes = {"text_config": text, "vision_config": given["vision_config"]}
    sizes |= {"mm_tokens_per_image": given["tokens"]} if "tokens" in given else {}
    return {**sizes, "tie_word_embeddings": True, "dtype": "bfloat16", **special_ids(shape)}


def processor_files(shape: str) -> dict[str, dict[str, Any]]:
    """The files by which vLLM's processor, and ours, know how the model sees images."""
    given = SEEING[shape]
    vision, (mean, std), (least, most) = given["vision_config"], given["mean_std"], given["pixels"]
    if "tokens" in given:
        side, named = vision["image_size"], {"processor_class": "Gemma3Processor"}
        images = {"size": {"height": side, "width": side}, "image_mean": mean, "image_std": std}
        return {
            "preprocessor_config.json": {"image_processor_type": "Gemma3ImageProcessor", **images, **named},
            "processor_config.json": {"image_seq_length": given["tokens"], **named},
        }
    processor, video = VIDEO_PROCESSORS[given["model_type"]]
    both = {
        "patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"], "image_mean": mean,
        "temporal_patch_size": vision["temporal_patch_size"], "image_std": std,
        "size": {"shortest_edge": least, "longest_edge": most},
    }  # fmt: skip
    frames = {"min_frames": 2, "max_frames": 4, "fps": 2}
    return {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **both},
        "video_preprocessor_config.json": {"video_processor_type": video, **both, **frames},
        "processor_config.json": {"processor_class": processor},
    }
