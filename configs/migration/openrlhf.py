"""The settings of OpenRLHF's `train_ppo_ray`, as a run file."""

from configs.migration.draft import (
    Draft,
    Given,
    Steps,
    data_path,
    list_the_rest,
    rename,
    rows_of,
    run_name,
    set_every,
    set_sampling,
    set_schedule,
    set_steps,
    set_versions,
    set_warmup,
    split_gpus,
)
from configs.migration.values import GAE, SHARED, UNUSED, CriticNames, set_critic
from configs.migration.verl import AUTO, COLOCATED, SHARED_ROWS

CRITIC = CriticNames(
    "critic_learning_rate", 9e-6, "value_clip", "max_epochs", "lambd", "freezing_actor_steps", "critic_pretrain",
)  # fmt: skip
NAMES = {
    "pretrain": "model.path",
    "prompt_max_len": "data.max_prompt_tokens",
    "generate_max_len": "sampling.max_tokens",
    "seed": "run.seed",
    "actor_learning_rate": "learner.lr",
    "l2": "learner.weight_decay",
    "max_norm": "learner.max_grad_norm",
    "adam_betas": "learner.betas",
    "entropy_loss_coef": "algorithm.entropy_bonus",
    "max_ckpt_num": "learner.keep_checkpoints",
}
DEFAULTS = {"prompt_max_len": 1024, "generate_max_len": 1024, "actor_learning_rate": 1e-6}
ADVANTAGES = {
    "group_norm": "group_std",
    "dr_grpo": "group_mean",
    "rloo": "leave_one_out",
    "reinforce_baseline": "reinforce_baseline",
}
ROWS = "prompts and answers are columns: docs/data.md"
REASONS = {
    **dict.fromkeys(("critic_learning_rate", "critic_pretrain", "freezing_actor_steps"), UNUSED),
    "critic_num_nodes": SHARED,
    "critic_num_gpus_per_node": SHARED,
    "ref_num_nodes": "= the reference is computed in the learner's own microbatches",
    "ref_num_gpus_per_node": "= the reference is computed in the learner's own microbatches",
    "reward_num_nodes": "= reward.servers",
    "reward_num_gpus_per_node": "= reward.servers",
    "colocate_all_models": COLOCATED,
    "colocate_actor_ref": "= the reference is computed in the learner's own microbatches",
    "vllm_enable_sleep": COLOCATED,
    "deepspeed_enable_sleep": COLOCATED,
    "vllm_gpu_memory_utilization": "= a server has its GPU for itself and takes vLLM's own default",
    "vllm_sync_backend": "= weights travel over NCCL",
    "vllm_sync_with_ray": "= weights travel over NCCL",
    "enforce_eager": "= servers use CUDA graphs",
    "enable_prefix_caching": "= servers cache prefixes",
    "micro_train_batch_size": AUTO,
    "micro_rollout_batch_size": "= groups are generated as places are free",
    "gradient_checkpointing": AUTO,
    "gradient_checkpointing_use_reentrant": AUTO,
    "packing_samples": "= samples are always packed without padding",
    "use_dynamic_batch": "= microbatches are always packed by tokens",
    "train_max_tokens_per_gpu": AUTO,
    "rollout_max_tokens_per_gpu": AUTO,
    "adam_offload": "= learner.cpu_offload: optimizer, if a GPU is too small",
    "zero_stage": "= the learner is FSDP2",
    "zpg": "= learner.shard",
    "overlap_comm": "= the learner is FSDP2",
    "bf16": "= model.dtype is bfloat16",
    "param_dtype": "= model.dtype is bfloat16",
    "flash_attn": "= learner.attention is auto",
    "attn_implementation": "= learner.attention is auto",
    "normalize_reward": "= advantages are centred by group; reinforce_baseline normalises over the batch",
    "apply_chat_template": "= the tokenizer's chat template; data.chat_template: none for a base model",
    "kl_estimator": "= algorithm.reference_kl is k2",
    "gamma": "algorithm.turn_discount is the discount between turns",
    "lambd": UNUSED,
    "value_clip": UNUSED,
    "save_path": "= runs are in run.folder",
    "ckpt_path": "= runs are in run.folder",
    "load_checkpoint": "= a run that is launched again goes on by itself",
    "save_hf_ckpt": "= learner.export_every",
    "disable_ds_ckpt": "= checkpoints are written by torch.distributed.checkpoint",
    "logging_steps": "= metrics.jsonl has every version",
    "input_template": "set data.format_prompt, a Jinja template",
    "async_train": "= the run is asynchronous",
    "async_queue_size": "= batch.max_staleness",
    "wandb_project": "= trackers have the run's name",
    "wandb_org": "wandb takes it from WANDB_ENTITY",
    "ring_attn_size": SHARED_ROWS,
    "ring_head_stride": "ranks that share a sample exchange heads, see docs/long-documents.md",
    "num_episodes": "= run.versions",
    "address": "= cluster.address names a Ray cluster",
    "runtime-env-json": "= cluster.ship and cluster.env",
    "no-wait": "= launch ends with the run",
}


def recognises(given: Given) -> bool:
    return {"pretrain", "prompt_data"} <= set(given.settings) or "n_samples_per_prompt" in given.settings


def convert(given: Given, draft: Draft) -> None:
    given.settings = DEFAULTS | given.settings
    rename(given, draft, NAMES)
    samples = int(given.take("n_samples_per_prompt", default=1))
    prompts, answers = (
        int(given.take("rollout_batch_size", default=1024)),
        int(given.take("train_batch_size", default=128)),
    )
    steps = Steps(prompts, max(1, prompts * samples // answers))
    if samples < 2:
        draft.lacks("n_samples_per_prompt", samples, "a group needs 2 answers or more for its baseline; 8 are taken")
    counted = f"rollout_batch_size {prompts} (prompts) and train_batch_size {answers} (answers)"
    set_steps(draft, steps, samples if samples > 1 else 8, counted)
    _data(given, draft)
    _reward(given, draft)
    _algorithm(given, draft, steps.updates)
    _schedule(given, draft, steps)
    if rank := given.take("lora_rank", default=0):
        draft.set("model.lora.rank", rank)
        draft.set("model.lora.alpha", given.take("lora_alpha", default=16))
        targets = given.take("target_modules", default="all-linear")
        draft.set(
            "model.lora.targets",
            "all" if targets == "all-linear" else [targets] if isinstance(targets, str) else targets,
        )
    set_sampling(given, draft, "")
    _gpus(given, draft)
    draft.set("run.name", run_name(given.take("wandb_run_name")))
    draft.set("log.trackers", [name for name in ("wandb", "tensorboard") if given.take(f"use_{name}")] or None)
    list_the_rest(given, draft, REASONS)


def _data(given: Given, draft: Draft) -> None:
    train, held_out = given.take("prompt_data"), given.take("eval_dataset")
    split = given.take("prompt_split", default="train")
    draft.set("data.train", data_path(draft, "prompt_data", train, split) if train else None)
    held_split = given.take("eval_split", default="test")
    draft.set("data.eval", data_path(draft, "eval_dataset", held_out, held_split) if held_out else None)
    prompt, answer = given.take("input_key", default="input"), given.take("label_key")
    ours = "prompt" if given.settings.get("apply_chat_template") else "problem"
    draft.set(f"data.columns.{ours}", prompt if prompt != ours else None)
    draft.set("data.columns.answer", answer if answer not in (None, "answer") else None)
    if (most := given.take("max_samples")) is not None:
        draft.lacks("max_samples", most, "all rows of the file are taken; cut the file")


def _reward(given: Given, draft: Draft) -> None:
    url, model = given.take("remote_rm_url"), given.take("reward_pretrain")
    if agent := given.take("agent_func_path"):
        draft.lacks("agent_func_path", agent, "write it as a task, rollout.task: path.py:function, see docs/tasks.md")
    if isinstance(url, str) and url.endswith(".py"):
        how = "its reward_func(queries, prompts, labels) becomes f(solution_str, ground_truth), see docs/rewards.md"
        draft.lacks("remote_rm_url", url, f"{how}; reward.function: math is taken until then")
    elif url or model:
        asked = "remote_rm_url" if url else "reward_pretrain"
        how = "reward.function: reward_model asks one, see docs/rewards.md; reward.function: math is taken until then"
        draft.lacks(asked, url or model, how)
    draft.set("reward.function", "math")


def _algorithm(given: Given, draft: Draft, updates: int) -> None:
    estimator = given.take("advantage_estimator", default="gae")
    if estimator not in (*ADVANTAGES, GAE):
        why = "there is no such baseline; algorithm.advantage: group_mean is taken"
        draft.lacks("advantage_estimator", estimator, why)
    kind, advantage = given.take("policy_loss_type", default="ppo"), ADVANTAGES.get(estimator, "group_mean")
    loss = kind if kind in ("ppo", "gspo") else "ppo"
    if kind != loss:
        draft.lacks("policy_loss_type", kind, "algorithm.loss: ppo is taken; docs/algorithms.md has others")
    draft.set("algorithm.loss", loss)
    draft.set("algorithm.advantage", advantage)
    if estimator == GAE:
        set_critic(given, draft, CRITIC, updates)
    if estimator == "group_norm":
        draft.note(f"GRPO (group_norm) is algorithm.loss: {loss} with algorithm.advantage: {advantage}")
    clip = given.take("eps_clip", default=0.2)
    low, high = given.take("eps_clip_low_high", default=[clip, clip])
    draft.set("algorithm.clip_low", low)
    draft.set("algorithm.clip_high", high)
    draft.set("algorithm.dual_clip", given.take("dual_clip"))
    coefficient, in_loss = given.take("init_kl_coef", default=0.01), given.take("use_kl_loss", default=False)
    if in_loss and coefficient:
        draft.set("algorithm.reference_kl", coefficient)
        draft.note(f"init_kl_coef {coefficient} with use_kl_loss is algorithm.reference_kl, as k2")
    elif coefficient:
        draft.lacks("init_kl_coef", coefficient, "KL is a term of the loss: set algorithm.reference_kl")
    if given.take("dynamic_filtering"):
        given.take("dynamic_filtering_reward_range")
        draft.set("batch.skip_zero_variance", True)
        draft.note("dynamic_filtering: batch.skip_zero_variance leaves out groups whose rewards are all equal")
    if (epochs := given.take("max_epochs", default=1)) != 1:
        draft.lacks("max_epochs", epochs, "a batch is trained once")


def _schedule(given: Given, draft: Draft, steps: Steps) -> None:
    set_versions(draft, None, given.take("num_episodes", default=1), steps.updates, rows_of(draft), steps.prompts)
    set_every(given, draft, steps.updates, "save_steps", "eval_steps")
    set_warmup(draft, "lr_warmup_ratio", given.take("lr_warmup_ratio", default=0.03))
    set_schedule(draft, "lr_scheduler", given.take("lr_scheduler", default="cosine_with_min_lr"))


def _gpus(given: Given, draft: Draft) -> None:
    nodes = int(given.take("actor_num_nodes", default=1))
    learners = nodes * int(given.take("actor_num_gpus_per_node", default=8))
    servers = int(given.take("vllm_num_engines", default=0))
    wide = int(given.take("vllm_tensor_parallel_size", default=1))
    if servers and not given.settings.get("colocate_all_models"):
        draft.set("learner.ranks", learners)
        draft.set("learner.nodes", nodes if nodes > 1 else None)
        draft.set("rollout.servers", servers)
        draft.set("rollout.tensor_parallel", wide if wide > 1 else None)
        draft.note(f"{learners + servers * wide} GPUs, as before: {learners} ranks and {servers} servers x {wide}")
    else:
        split_gpus(draft, learners, nodes, wide)
