"""What Headrace leans on in transformers beyond its plain interface. `make next-vllm` judges a release by it."""

from functools import cache

from configs.releases import needs
from configs.releases.needs import Need
from configs.releases.source import Source

OLDEST, NEWEST_RUN, NEWEST_READ = "5.5.3", "5.19", "5.22"
"""The third was judged from its wheel only, the others were run."""
REMEDY = f"install a transformers that was run, {OLDEST} to {NEWEST_RUN}"
MODELING = "transformers.models"
ROW = "transformers' decoders take a packed row"
DECODER = "forward(input_ids, attention_mask, position_ids, ..., inputs_embeds=..., use_cache=...)"

NEEDS = (
    Need(
        "transformers.modeling_utils.AttentionInterface",
        "the learner's attentions are registered there",
        calls=("register(key, value)",),
    ),
    Need(
        "transformers.masking_utils.AttentionMaskInterface",
        "the trial of a model judges its masks there",
        calls=("register(key, value)",),
    ),
    Need(
        "transformers.modeling_utils.PreTrainedModel",
        "models that the learner trains",
        has="config _keep_in_fp32_modules_strict",
        calls=("get_decoder()", "get_output_embeddings()", "num_parameters()"),
    ),
    Need(
        "transformers.configuration_utils.PreTrainedConfig",
        "a model's config",
        has="_attn_implementation_internal _experts_implementation",
        calls=(
            "get_text_config()",
            "to_dict()",
            "save_pretrained(save_directory)",
            "get_config_dict(pretrained_model_name_or_path)",
        ),
    ),
    Need(
        "transformers.modeling_layers.GradientCheckpointingLayer",
        "compiled blocks with experts are recomputed from outside, not by their forward pass",
        has="__call__",
    ),
    Need("transformers.models.auto.modeling_auto.AutoModelForCausalLM", "text models are built by it"),
    Need("transformers.models.auto.modeling_auto.AutoModelForImageTextToText", "models that see are built by it"),
    Need("transformers.models.auto.configuration_auto.AutoConfig", "configs are read by it"),
    Need("transformers.models.auto.tokenization_auto.AutoTokenizer", "tokenizers are read by it"),
    Need("transformers.generation.GenerationConfig", "it names tokens that end an answer", has="eos_token_id"),
    Need("transformers.feature_extraction_utils.BatchFeature", "patches of images go to vLLM in it"),
    Need("transformers.utils.logging.disable_progress_bar", "progress bars fill logs"),
    Need(
        "transformers.utils.hub.cached_file",
        "files of a model on the hub are copied into checkpoints",
        calls=("cached_file(path_or_repo_id, filename)",),
    ),
    *(
        Need(
            f"{MODELING}.{kind}.modeling_{kind}.{name}Model",
            ROW,
            has="layers embed_tokens norm",
            calls=(DECODER,),
        )
        for kind, name in (("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("qwen3_moe", "Qwen3Moe"))
    ),
    *(
        Need(
            f"{MODELING}.{kind}.modeling_{kind}.{name}Attention",
            "its arguments reach the learner's kernels",
            follows="forward",
        )
        for kind, name in (("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("qwen3_moe", "Qwen3Moe"))
    ),
    Need(
        f"{MODELING}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer",
        "its router is told what the layer is given",
        has="mlp forward",
    ),
    Need(
        f"{MODELING}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        "the learner's router takes the place of its gate",
        has="gate experts",
        follows="forward",
    ),
    Need(
        f"{MODELING}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter",
        "the learner's router takes its place",
        has="weight top_k norm_topk_prob",
        follows="forward",
    ),
    *(
        Need(
            f"{MODELING}.{kind}.modeling_{kind}.{name}Model",
            "towers are called with the bounds of all images",
            has="patch_embed merger blocks spatial_merge_size",
            follows="forward",
        )
        for kind, name in (("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrained"), ("qwen3_vl", "Qwen3VLVision"))
    ),
    Need(
        f"{MODELING}.qwen3_5.modeling_qwen3_5.Qwen3_5VisionModel",
        "towers are called with the bounds of all images",
        since="5.16",
        has="patch_embed merger blocks spatial_merge_size",
        follows="forward",
    ),
    Need(
        f"{MODELING}.qwen3_5.modeling_qwen3_5.Qwen3_5TextModel",
        "features of images go to places, not to token ids",
        since="5.16",
        has="layers embed_tokens",
        follows="forward",
    ),
    Need(
        f"{MODELING}.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel",
        "features of images go to places, not to token ids",
        has="layers embed_tokens",
        calls=("_deepstack_process(hidden_states, visual_pos_masks, visual_embeds)",),
        follows="_deepstack_process forward",
    ),
    Need(
        f"{MODELING}.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLTextModel",
        "features of images go to places, not to token ids",
        has="layers embed_tokens",
        follows="forward",
    ),
    Need(
        f"{MODELING}.siglip.modeling_siglip.SiglipVisionModel",
        "Gemma 3's tower is called part by part",
        has="embeddings encoder post_layernorm",
        follows="forward",
    ),
    Need(
        f"{MODELING}.siglip.modeling_siglip.SiglipEncoder",
        "the bounds of images reach each block",
        has="layers",
        follows="forward",
    ),
    Need(
        f"{MODELING}.gemma3.modeling_gemma3.Gemma3MultiModalProjector",
        "patches become features of a token",
        has="mm_input_projection_weight mm_soft_emb_norm kernel_size",
        follows="forward",
    ),
    Need(
        f"{MODELING}.gemma3.modeling_gemma3.Gemma3TextModel",
        "features of images go to places, not to token ids",
        has="layers embed_tokens",
        follows="forward",
    ),
    Need(
        "transformers.vision_utils.get_vision_cu_seqlens",
        "bounds of images, computed on the CPU",
        since="5.16",
        calls=("get_vision_cu_seqlens(grid_thw)",),
    ),
    Need(
        "transformers.vision_utils.get_vision_position_ids",
        "positions of patches, computed on the CPU",
        since="5.16",
        calls=("get_vision_position_ids(grid_thw, spatial_merge_size)",),
    ),
    Need(
        "transformers.vision_utils.get_vision_window_index",
        "windows of patches, computed on the CPU",
        since="5.16",
        calls=("get_vision_window_index(grid_thw, spatial_merge_size, window_size, patch_size)",),
    ),
    Need(
        "transformers.vision_utils.get_vision_interpolation_indices_and_weights",
        "positions of patches, computed on the CPU",
        since="5.16",
        calls=(
            "get_vision_interpolation_indices_and_weights(grid_thw, num_grid_per_side, mode=..., align_corners=...,"
            " spatial_merge_size=...)",
        ),
    ),
)


def installed() -> Source | None:
    return Source.installed("transformers", "transformers")


@cache
def lacking() -> tuple[str, ...]:
    """Return a line for each thing that the installed transformers lack; none without them."""
    source = installed()
    return () if source is None else tuple(f"{source.number}: {line}" for line in needs.moved(NEEDS, source))
