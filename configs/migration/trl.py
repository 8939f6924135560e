"""The settings of TRL's GRPOTrainer, as a run file."""

from configs.migration.draft import (
    Draft,
    Given,
    Steps,
    data_path,
    list_the_rest,
    rename,
    rows_of,
    run_name,
    set_sampling,
    set_schedule,
    set_steps,
    set_trackers,
    set_versions,
    set_warmup,
    split_gpus,
)
from configs.migration.verl import AUTO

NAMES = {
    "model_name_or_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "max_completion_length": "sampling.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "shuffle_dataset": "data.shuffle",
    "seed": "run.seed",
    "learning_rate": "learner.lr",
    "weight_decay": "learner.weight_decay",
    "max_grad_norm": "learner.max_grad_norm",
    "adam_epsilon": "learner.eps",
    "save_total_limit": "learner.keep_checkpoints",
    "chat_template_kwargs": "rollout.chat.template_kwargs",
    "vllm_max_model_length": "rollout.engine.max_model_len",
}
DEFAULTS = {"max_completion_length": 256, "learning_rate": 1e-6}
"""TRL's own defaults where ours differ."""
SCALES = {"group": "group_std", "batch": "batch_std", "none": "group_mean", "true": "group_std", "false": "group_mean"}
LOSSES = {
    "grpo": ("ppo", "sequence"),
    "bnpo": ("ppo", "token"),
    "dapo": ("ppo", "token"),
    "dr_grpo": ("ppo", "constant"),
    "cispo": ("cispo", "token"),
}
REWARDS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math"}
OWN_GPUS = "= servers have GPUs of their own"
REASONS = {
    "num_iterations": "a batch is trained once",
    "lora_dropout": "adapters have no dropout, so that servers compute what the learner does",
    "lora_task_type": "= the task is always to write text",
    "task_type": "= the task is always to write text",
    "bias": "adapters have no biases",
    "use_vllm": "= servers are always vLLM's",
    "vllm_mode": OWN_GPUS,
    "vllm_gpu_memory_utilization": "= a server has its GPU for itself and takes vLLM's own default",
    "vllm_enable_sleep_mode": OWN_GPUS,
    "vllm_server_host": "= servers find the learner through the buffer",
    "vllm_server_port": "= servers find the learner through the buffer",
    "vllm_server_base_url": "= servers find the learner through the buffer",
    "vllm_server_timeout": "= servers find the learner through the buffer",
    "vllm_group_port": "= servers find the learner through the buffer",
    "gradient_checkpointing": AUTO,
    "gradient_checkpointing_kwargs": AUTO,
    "use_liger_kernel": "= the head computes log-probabilities chunk by chunk",
    "bf16": "= model.dtype is bfloat16",
    "fp16": "model.dtype is bfloat16 or float32",
    "dtype": "= model.dtype is bfloat16",
    "torch_dtype": "= model.dtype is bfloat16",
    "attn_implementation": "= learner.attention is auto",
    "optim": "= AdamW with float32 state",
    "remove_unused_columns": "= rewards and tasks always get the whole row",
    "disable_dropout": "= dropout is always off",
    "logging_steps": "= metrics.jsonl has every version",
    "logging_first_step": "= metrics.jsonl has every version",
    "log_completions": "= the buffer keeps samples: `python -m buffer tail`",
    "num_completions_to_print": "= the buffer keeps samples: `python -m buffer tail`",
    "push_to_hub": "an export is a folder; `huggingface-cli upload` pushes it",
    "hub_model_id": "an export is a folder; `huggingface-cli upload` pushes it",
    "ddp_timeout": "= learner.timeout_s",
    "deepspeed": "= the learner is FSDP2",
    "overwrite_output_dir": "= a run that is launched again goes on by itself",
    "sync_ref_model": "the reference is the initial model",
    "per_device_eval_batch_size": "= an evaluation takes places as they are free",
    "eval_on_start": "= eval.every evaluates version 0 too",
    "save_strategy": "= checkpoints are written each learner.checkpoint_every versions",
    "eval_strategy": "= set eval.every for evaluations during the run",
    "model_init_kwargs": "the model is built in model.dtype with learner.attention",
    "dataset_config": "= downloaded with the data set",
}
"""With `=`: settings that need no counterpart."""


def recognises(given: Given) -> bool:
    known = {"num_generations", "max_completion_length", "scale_rewards", "per_device_train_batch_size", "reward_funcs"}
    return len(known & set(given.settings)) > 0


def convert(given: Given, draft: Draft) -> None:
    given.settings = DEFAULTS | given.settings
    rename(given, draft, NAMES)
    samples = int(given.take("num_generations", default=8))
    processes = int(given.take("num_processes", default=0))
    if not processes:
        draft.lacks("num_processes", "not in the file", "1 is taken: multiply batch.groups and learner.ranks by it")
    processes = max(1, processes)
    each, accumulated = (
        int(given.take(key, default=number))
        for key, number in (("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1))
    )
    answers, per_generation = each * accumulated * processes, given.take("steps_per_generation", default=accumulated)
    generated = int(given.take("generation_batch_size", default=int(per_generation) * each * processes))
    steps = Steps(max(1, generated // samples), max(1, generated // answers))
    product = f"{each} x gradient_accumulation_steps {accumulated} x {processes} processes = {answers} answers"
    set_steps(draft, steps, samples, f"per_device_train_batch_size {product}")
    _data(given, draft)
    _algorithm(given, draft)
    _schedule(given, draft, steps)
    _adapter(given, draft)
    set_sampling(given, draft, "")
    split_gpus(draft, 2 * processes, 1, int(given.take("vllm_tensor_parallel_size", default=1)))
    name = given.take("run_name") or str(given.take("output_dir", default="")).rstrip("/").rpartition("/")[2]
    draft.set("run.name", run_name(name))
    set_trackers(given.take("report_to"), draft)
    if given.take("num_iterations", default=1) != 1:
        draft.lacks("num_iterations", given.settings["num_iterations"], REASONS["num_iterations"])
    list_the_rest(given, draft, REASONS)


def _data(given: Given, draft: Draft) -> None:
    name, split = given.take("dataset_name"), given.take("dataset_train_split", default="train")
    draft.set("data.train", data_path(draft, "dataset_name", name, split) if name else None)
    functions = given.take("reward_funcs", "reward_model_name_or_path")
    named = [functions] if isinstance(functions, str) else functions or []
    known = next((REWARDS[each] for each in named if each in REWARDS), None)
    draft.set("reward.function", known or "math")
    for function in named:
        if function not in REWARDS:
            how = "its (completions, **columns) becomes (solution_str, ground_truth), see docs/rewards.md"
            draft.lacks("reward_funcs", function, f"{how}; then name it as path.py:function")
    if not named:
        draft.lacks("reward_funcs", "not in the file", "reward.function: math is taken; docs/rewards.md has others")


def _algorithm(given: Given, draft: Draft) -> None:
    kind = given.take("loss_type", default="dapo")
    if kind not in LOSSES:
        draft.lacks("loss_type", kind, "algorithm.loss: ppo is taken; docs/algorithms.md has others")
    loss, aggregation = LOSSES.get(kind, ("ppo", "token"))
    if given.take("importance_sampling_level", default="token") == "sequence":
        loss = "gspo"
    scale = str(given.take("scale_rewards", default="group")).lower()
    if scale not in SCALES:
        draft.lacks("scale_rewards", scale, "algorithm.advantage: group_mean is taken")
    advantage = SCALES.get(scale, "group_mean")
    for key, value in (("loss", loss), ("advantage", advantage), ("aggregation", aggregation)):
        draft.set(f"algorithm.{key}", value)
    draft.note(f"loss_type {kind} is algorithm.loss: {loss} with {advantage} and algorithm.aggregation: {aggregation}")
    low = given.take("epsilon", default=0.2)
    high, bound = given.take("epsilon_high"), given.take("delta")
    draft.set("algorithm.clip_low", low)
    draft.set("algorithm.is_cap" if loss == "cispo" else "algorithm.clip_high", low if high is None else high)
    draft.set("algorithm.dual_clip", bound)
    beta = given.take("beta", default=0.0)
    draft.set("algorithm.reference_kl", beta or None)
    if beta:
        draft.note(f"beta {beta} is algorithm.reference_kl, as k2 (TRL has k3)")
    draft.set("algorithm.overlong", "mask" if given.take("mask_truncated_completions") else None)


def _schedule(given: Given, draft: Draft, steps: Steps) -> None:
    total, epochs = given.take("max_steps", default=-1), given.take("num_train_epochs", default=3)
    if total > 0:  # TRL counts optimizer steps, as versions do
        draft.set("run.versions", total)
    else:
        set_versions(draft, None, epochs, steps.updates, rows_of(draft), steps.prompts)
    draft.set("learner.checkpoint_every", given.take("save_steps"))
    if given.take("eval_steps"):
        draft.lacks("eval_steps", given.settings["eval_steps"], "name a file in data.eval, then set eval.every")
    ratio, warmup = given.take("warmup_ratio", default=0.0), given.take("warmup_steps")
    if warmup is None:
        set_warmup(draft, "warmup_ratio", ratio)
    else:
        draft.set("learner.warmup_versions", warmup)
    set_schedule(draft, "lr_scheduler_type", given.take("lr_scheduler_type", default="linear"))
    betas = given.take("adam_beta1", default=0.9), given.take("adam_beta2", default=0.999)
    draft.set("learner.betas", list(betas))


def _adapter(given: Given, draft: Draft) -> None:
    rank, alpha = given.take("lora_r"), given.take("lora_alpha", default=32)
    targets, wanted = given.take("lora_target_modules", default="all-linear"), given.take("use_peft", default=False)
    if wanted or rank:
        draft.set("model.lora.rank", rank or 16)
        draft.set("model.lora.alpha", alpha)
        draft.set("model.lora.targets", "all" if targets in ("all-linear", ["all-linear"]) else targets)
