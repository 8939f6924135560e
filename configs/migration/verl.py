"""The settings of verl's `main_ppo`, as a run file."""

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
    set_trackers,
    set_versions,
    set_warmup,
    split_gpus,
)
from configs.migration.values import GAE, SHARED, UNUSED, CriticNames, set_critic

CRITIC = CriticNames(
    "critic.optim.lr", 1e-5, "critic.cliprange_value", "critic.ppo_epochs", "algorithm.lam", "trainer.critic_warmup",
    "critic.model.path",
)  # fmt: skip
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
RATIO, STYLE = f"{ACTOR}optim.lr_warmup_steps_ratio", f"{ACTOR}optim.lr_scheduler_type"
NAMES = {
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "sampling.max_tokens",
    "data.shuffle": "data.shuffle",
    "data.seed": "run.seed",
    f"{MODEL}path": "model.path",
    f"{MODEL}trust_remote_code": "model.trust_remote_code",
    f"{ACTOR}optim.lr": "learner.lr",
    f"{ACTOR}optim.weight_decay": "learner.weight_decay",
    f"{ACTOR}optim.betas": "learner.betas",
    f"{ACTOR}grad_clip": "learner.max_grad_norm",
    f"{ACTOR}entropy_coeff": "algorithm.entropy_bonus",
    f"{ROLLOUT}max_model_len": "rollout.engine.max_model_len",
    "trainer.max_actor_ckpt_to_keep": "learner.keep_checkpoints",
}
DEFAULTS = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ACTOR}optim.weight_decay": 0.01,
    f"{ACTOR}optim.betas": [0.9, 0.999],
}
"""verl's own defaults where ours differ."""
ADVANTAGES = {
    "grpo": "group_std",
    "rloo": "leave_one_out",
    "reinforce_plus_plus_baseline": "reinforce_baseline",
}
AGGREGATIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}
LOSSES = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}
AUTO = "= the learner decides it from the GPU's memory"
COLOCATED = "= servers and learner have GPUs of their own, so nothing is offloaded to make room"
SHARED_ROWS = "set learner.context_parallel to it if samples are longer than one GPU holds, see docs/long-documents.md"
REASONS = {
    "critic.": SHARED,
    "reward_model.": "a reward model is served by `reward.function: reward_model`, see docs/rewards.md",
    "data.filter_overlong_prompts": "= a problem with a longer prompt is always dropped, with that reason",
    "data.truncation": "= prompts are never cut; longer ones are dropped with that reason",
    "data.val_batch_size": "= an evaluation takes places as they are free",
    "data.return_raw_chat": "= tasks always get the row",
    f"{MODEL}use_remove_padding": "= samples are always packed without padding",
    f"{MODEL}enable_gradient_checkpointing": AUTO,
    f"{MODEL}enable_activation_offload": AUTO,
    f"{ACTOR}ppo_micro_batch_size": AUTO,
    f"{ACTOR}ppo_micro_batch_size_per_gpu": AUTO,
    f"{ACTOR}ppo_max_token_len_per_gpu": AUTO,
    f"{ACTOR}use_dynamic_bsz": "= microbatches are always packed by tokens",
    f"{ACTOR}use_torch_compile": AUTO,
    f"{ACTOR}fsdp_config.": COLOCATED,
    f"{ACTOR}strategy": "= the learner is FSDP2",
    f"{ACTOR}ulysses_sequence_parallel_size": SHARED_ROWS,
    "actor_rollout_ref.ref.": "= the reference is computed in the learner's own microbatches",
    "actor_rollout_ref.hybrid_engine": "= servers and learner have GPUs of their own",
    f"{ROLLOUT}log_prob_micro_batch_size": "= behaviour log-probabilities are recorded by the server, never recomputed",
    f"{ROLLOUT}log_prob_micro_batch_size_per_gpu": "= behaviour log-probabilities are recorded by the server",
    f"{ROLLOUT}gpu_memory_utilization": "= a server has its GPU for itself and takes vLLM's own default",
    f"{ROLLOUT}enforce_eager": "= servers use CUDA graphs",
    f"{ROLLOUT}free_cache_engine": COLOCATED,
    f"{ROLLOUT}enable_chunked_prefill": "= vLLM's default",
    f"{ROLLOUT}load_format": "= servers get the learner's weights",
    f"{ROLLOUT}layered_summon": "= servers get the learner's weights",
    f"{ROLLOUT}max_num_batched_tokens": "= vLLM's default",
    f"{ROLLOUT}max_num_seqs": "= rollout.sequences is auto",
    f"{ROLLOUT}mode": "= generation is always asynchronous",
    f"{ROLLOUT}multi_turn.": "turns and tools are a task of your own: docs/tasks.md and docs/agents.md",
    f"{ROLLOUT}agent.": "turns and tools are a task of your own: docs/tasks.md and docs/agents.md",
    f"{ROLLOUT}val_kwargs.": "set it for the set of data.eval, see docs/evaluation.md",
    "algorithm.lam": UNUSED,
    "trainer.critic_warmup": UNUSED,
    "trainer.project_name": "= trackers have the run's name",
    "trainer.val_before_train": "= eval.every evaluates version 0 too",
    "trainer.default_local_dir": "= runs are in run.folder",
    "trainer.resume_mode": "= a run that is launched again goes on by itself",
    "trainer.log_val_generations": "= eval.keep_samples",
    "trainer.balance_batch": "= parts are always balanced by tokens",
    "ray_kwargs.": "= cluster.address names a Ray cluster",
}


def recognises(settings: Given) -> bool:
    return any(key.startswith("actor_rollout_ref.") for key in settings.settings)


def convert(given: Given, draft: Draft) -> None:
    given.settings = DEFAULTS | given.settings
    rename(given, draft, NAMES)
    samples = int(given.take(f"{ROLLOUT}n", default=1))
    prompts = int(given.take("data.train_batch_size", "data.gen_batch_size", default=1024))
    mini = min(prompts, int(given.take(f"{ACTOR}ppo_mini_batch_size", default=256)))
    steps = Steps(prompts, max(1, prompts // mini))
    least = 2 if given.settings.get("algorithm.adv_estimator", GAE) == GAE else 8
    if samples < 2:
        draft.lacks(f"{ROLLOUT}n", samples, f"a group needs 2 answers or more; {least} are taken")
    counted = f"data.train_batch_size {prompts} and ppo_mini_batch_size {mini} (both count prompts)"
    set_steps(draft, steps, samples if samples > 1 else least, counted)
    _data(given, draft)
    _algorithm(given, draft, steps.updates)
    _schedule(given, draft, steps)
    _adapter(given, draft)
    set_sampling(given, draft, ROLLOUT)
    nodes = int(given.take("trainer.nnodes", default=1))
    gpus = nodes * int(given.take("trainer.n_gpus_per_node", default=8))
    split_gpus(draft, gpus, nodes, int(given.take(f"{ROLLOUT}tensor_model_parallel_size", default=1)))
    if (engine := given.take(f"{ROLLOUT}name")) not in (None, "vllm"):
        draft.lacks(f"{ROLLOUT}name", engine, "servers are vLLM's")
    draft.set("run.name", run_name(given.take("trainer.experiment_name")))
    set_trackers(given.take("trainer.logger"), draft)
    list_the_rest(given, draft, REASONS)


def _data(given: Given, draft: Draft) -> None:
    train, held_out = given.take("data.train_files"), given.take("data.val_files")
    draft.set("data.train", data_path(draft, "data.train_files", train) if train else None)
    if held_out:
        path = data_path(draft, "data.val_files", held_out, "test")
        if isinstance(path, list):  # a set each
            path = {f"set{number}": one for number, one in enumerate(path, 1)}
        draft.set("data.eval", path)
    if (prompt := given.take("data.prompt_key")) not in (None, "prompt"):
        draft.set("data.columns.prompt", prompt)
    if (images := given.take("data.image_key")) not in (None, "images"):
        draft.set("data.columns.images", images)
    path, name = given.take("custom_reward_function.path"), given.take("custom_reward_function.name")
    draft.set("reward.function", f"{path}:{name or 'compute_score'}" if path else "math")
    if not path:
        draft.lacks("reward by data_source", "verl's own", "reward.function: math is taken; docs/rewards.md has others")


def _algorithm(given: Given, draft: Draft, updates: int) -> None:
    estimator = given.take("algorithm.adv_estimator", default="gae")
    by_spread = given.take("algorithm.norm_adv_by_std_in_grpo", default=True)
    advantage = ADVANTAGES.get(estimator, "group_mean")
    advantage = "group_mean" if estimator == "grpo" and not by_spread else advantage
    if estimator not in (*ADVANTAGES, GAE):
        why = "there is no such baseline; algorithm.advantage: group_mean is taken"
        draft.lacks("algorithm.adv_estimator", estimator, why)
    mode = given.take(f"{ACTOR}policy_loss.loss_mode", default="vanilla")
    loss = LOSSES.get(mode, "ppo")
    if mode not in LOSSES:
        draft.lacks(f"{ACTOR}policy_loss.loss_mode", mode, "ppo is taken; docs/algorithms.md has others")
    draft.set("algorithm.loss", loss)
    draft.set("algorithm.advantage", advantage)
    if estimator == GAE:
        set_critic(given, draft, CRITIC, updates)
    if estimator == "grpo":
        draft.note(f"GRPO is algorithm.loss: {loss} with algorithm.advantage: {advantage}")
    clip = given.take(f"{ACTOR}clip_ratio", default=0.2)
    draft.set("algorithm.clip_low", given.take(f"{ACTOR}clip_ratio_low", default=clip))
    draft.set("algorithm.clip_high", given.take(f"{ACTOR}clip_ratio_high", default=clip))
    draft.set("algorithm.dual_clip", given.take(f"{ACTOR}clip_ratio_c", default=3.0))
    mean = given.take(f"{ACTOR}loss_agg_mode", default="token-mean")
    if mean in AGGREGATIONS:
        draft.set("algorithm.aggregation", AGGREGATIONS[mean])
        draft.set("algorithm.constant_length", 1 if mean == "seq-mean-token-sum" else None)
    else:
        draft.lacks(f"{ACTOR}loss_agg_mode", mean, "algorithm.aggregation: token is taken")
    _kl(given, draft)
    if (epochs := given.take(f"{ACTOR}ppo_epochs", default=1)) != 1:
        draft.lacks(f"{ACTOR}ppo_epochs", epochs, "a batch is trained once")
    _overlong(given, draft)
    if given.take("algorithm.filter_groups.enable"):
        draft.set("batch.skip_zero_variance", True)
        given.take("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches")


def _kl(given: Given, draft: Draft) -> None:
    coefficient = given.take(f"{ACTOR}kl_loss_coef", default=0.001)
    kind = given.take(f"{ACTOR}kl_loss_type", default="low_var_kl")
    in_reward = given.take("algorithm.kl_ctrl.kl_coef", default=0.001)
    if given.take(f"{ACTOR}use_kl_loss"):
        draft.set("algorithm.reference_kl", coefficient)
        draft.note(f"the KL loss is algorithm.reference_kl {coefficient}, as k2, not as kl_loss_type {kind}")
    if given.take("algorithm.use_kl_in_reward"):
        draft.lacks("algorithm.use_kl_in_reward", in_reward, "KL is a term of the loss: set algorithm.reference_kl")
    given.take("algorithm.kl_ctrl.type", "algorithm.kl_penalty")
    if (gamma := given.take("algorithm.gamma", default=1)) != 1:
        draft.lacks(
            "algorithm.gamma", gamma, "rewards are not discounted over tokens; algorithm.turn_discount is for turns"
        )


def _overlong(given: Given, draft: Draft) -> None:
    for start in ("reward_model.", "reward_model.reward_kwargs."):
        key = f"{start}overlong_buffer{'_cfg' if start.endswith('kwargs.') else ''}."
        if given.take(f"{key}enable"):
            draft.set("algorithm.overlong", "soft")
            draft.set("algorithm.overlong_buffer", given.take(f"{key}len"))
            draft.set("algorithm.overlong_factor", given.take(f"{key}penalty_factor"))
    if not given.settings.get("reward_model.enable"):
        given.take("reward_model.enable")


def _schedule(given: Given, draft: Draft, steps: Steps) -> None:
    total, epochs = given.take("trainer.total_training_steps"), given.take("trainer.total_epochs")
    set_versions(draft, total, epochs, steps.updates, rows_of(draft), steps.prompts)
    set_every(given, draft, steps.updates, "trainer.save_freq", "trainer.test_freq")
    warmup = given.take(f"{ACTOR}optim.lr_warmup_steps", default=-1)
    ratio = given.take(RATIO, default=0.0)
    if warmup >= 0:
        draft.set("learner.warmup_versions", warmup * steps.updates)
    else:
        set_warmup(draft, RATIO, ratio)
    set_schedule(draft, STYLE, given.take(STYLE, f"{ACTOR}optim.warmup_style", default="constant"))


def _adapter(given: Given, draft: Draft) -> None:
    rank, alpha = given.take(f"{MODEL}lora_rank", default=0), given.take(f"{MODEL}lora_alpha", default=16)
    targets = given.take(f"{MODEL}target_modules", default="all-linear")
    if rank:
        draft.set("model.lora.rank", rank)
        draft.set("model.lora.alpha", alpha)
        draft.set("model.lora.targets", "all" if targets == "all-linear" else targets)
