"""The settings of EasyR1, as a run file."""

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
from configs.migration.verl import ADVANTAGES, AUTO, COLOCATED, SHARED_ROWS

CRITIC = CriticNames(
    "worker.critic.optim.lr", 1e-6, "worker.critic.cliprange_value", "worker.critic.ppo_epochs", "algorithm.lam",
    "trainer.critic_warmup", "worker.critic.model.model_path",
)  # fmt: skip
ACTOR, ROLLOUT = "worker.actor.", "worker.rollout."
RATIO, STYLE = f"{ACTOR}optim.lr_warmup_ratio", f"{ACTOR}optim.lr_scheduler_type"
NAMES = {
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "sampling.max_tokens",
    "data.shuffle": "data.shuffle",
    "data.seed": "run.seed",
    "data.format_prompt": "data.format_prompt",
    "data.system_prompt": "data.system_prompt",
    "data.image_dir": "data.image_dir",
    "data.min_pixels": "data.min_pixels",
    "data.max_pixels": "data.max_pixels",
    f"{ACTOR}model.model_path": "model.path",
    f"{ACTOR}model.trust_remote_code": "model.trust_remote_code",
    f"{ACTOR}max_grad_norm": "learner.max_grad_norm",
    f"{ACTOR}optim.lr": "learner.lr",
    f"{ACTOR}optim.weight_decay": "learner.weight_decay",
    f"{ACTOR}optim.betas": "learner.betas",
    f"{ACTOR}entropy_coeff": "algorithm.entropy_bonus",
    f"{ROLLOUT}max_model_len": "rollout.engine.max_model_len",
    "worker.reward.reward_function_kwargs": "reward.kwargs",
}
DEFAULTS = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ACTOR}optim.weight_decay": 0.01,
    f"{ACTOR}optim.betas": [0.9, 0.999],
}
"""EasyR1's own defaults where ours differ."""
COLUMNS = {"prompt_key": "problem", "answer_key": "answer", "image_key": "images"}
LOSSES = {"default": "ppo", "gspo": "gspo", "gspo_token": "gspo", "cispo": "cispo"}
AVERAGES = {"token": "token", "seq": "sequence"}
REASONS = {
    "worker.critic.": SHARED,
    "algorithm.lam": UNUSED,
    "trainer.critic_warmup": UNUSED,
    "worker.ref.": "= the reference is computed in the learner's own microbatches",
    f"{ACTOR}micro_batch_size_per_device_for_update": AUTO,
    f"{ACTOR}micro_batch_size_per_device_for_experience": AUTO,
    f"{ACTOR}padding_free": "= samples are always packed without padding",
    f"{ACTOR}dynamic_batching": "= microbatches are always packed by tokens",
    f"{ACTOR}use_torch_compile": AUTO,
    f"{ACTOR}model.enable_gradient_checkpointing": AUTO,
    f"{ACTOR}ulysses_size": SHARED_ROWS,
    f"{ACTOR}ulysses_sequence_parallel_size": SHARED_ROWS,
    f"{ACTOR}optim.strategy": "= AdamW with float32 state",
    f"{ACTOR}fsdp.": "= the learner is FSDP2",
    f"{ACTOR}offload.": COLOCATED,
    f"{ROLLOUT}gpu_memory_utilization": "= a server has its GPU for itself and takes vLLM's own default",
    f"{ROLLOUT}enforce_eager": "= servers use CUDA graphs",
    f"{ROLLOUT}enable_chunked_prefill": "= vLLM's default",
    f"{ROLLOUT}limit_images": "= data.max_images",
    f"{ROLLOUT}val_override_config.": "set it for the set of data.eval, see docs/evaluation.md",
    "worker.reward.": "rewards are functions; docs/rewards.md has their conventions",
    "data.val_batch_size": "= an evaluation takes places as they are free",
    "data.mini_rollout_batch_size": "= groups are generated as places are free",
    "data.filter_overlong_prompts": "= a problem with a longer prompt is always dropped, with that reason",
    "trainer.project_name": "= trackers have the run's name",
    "trainer.val_before_train": "= eval.every evaluates version 0 too",
    "trainer.val_only": "`python -m rollout evaluate` evaluates without training",
    "trainer.val_generations_to_log": "= eval.keep_samples",
    "trainer.save_checkpoint_path": "= runs are in run.folder",
    "trainer.load_checkpoint_path": "= a run that is launched again goes on by itself",
    "trainer.find_last_checkpoint": "= a run that is launched again goes on by itself",
}


def recognises(given: Given) -> bool:
    return any(key.startswith("worker.actor.") for key in given.settings)


def convert(given: Given, draft: Draft) -> None:
    given.settings = DEFAULTS | given.settings
    rename(given, draft, NAMES)
    samples = int(given.take(f"{ROLLOUT}n", default=1))
    prompts = int(given.take("data.rollout_batch_size", default=512))
    each = min(prompts, int(given.take(f"{ACTOR}global_batch_size", default=256)))
    steps = Steps(prompts, max(1, prompts // each))
    if samples < 2:
        draft.lacks(f"{ROLLOUT}n", samples, "a group needs 2 answers or more for its baseline; 8 are taken")
    counted = f"data.rollout_batch_size {prompts} and worker.actor.global_batch_size {each} (both count prompts)"
    set_steps(draft, steps, samples if samples > 1 else 8, counted)
    _data(given, draft)
    _algorithm(given, draft, steps.updates)
    _schedule(given, draft, steps)
    set_sampling(given, draft, ROLLOUT)
    nodes = int(given.take("trainer.nnodes", default=1))
    gpus = nodes * int(given.take("trainer.n_gpus_per_node", default=8))
    split_gpus(draft, gpus, nodes, int(given.take(f"{ROLLOUT}tensor_parallel_size", default=2)))
    draft.set("run.name", run_name(given.take("trainer.experiment_name")))
    set_trackers(given.take("trainer.logger"), draft)
    list_the_rest(given, draft, REASONS)


def _data(given: Given, draft: Draft) -> None:
    train, held_out = given.take("data.train_files"), given.take("data.val_files")
    draft.set("data.train", data_path(draft, "data.train_files", train) if train else None)
    draft.set("data.eval", data_path(draft, "data.val_files", held_out, "test") if held_out else None)
    for theirs, ours in COLUMNS.items():
        column = given.take(f"data.{theirs}")
        draft.set(f"data.columns.{ours}", column if column != ours else None)
    function = given.take("worker.reward.reward_function", "worker.reward.score_function")
    name = given.take("worker.reward.reward_function_name")
    path = f"{function}:{name or 'main'}" if function and ":" not in str(function) else function
    given.take("worker.reward.reward_type")
    draft.set("reward.function", path or "math")
    if not path:
        draft.lacks("worker.reward.reward_function", path, "reward.function: math is taken; docs/rewards.md has others")
    draft.set("model.freeze", ["vision", "projector"] if given.take(f"{ACTOR}model.freeze_vision_tower") else None)


def _algorithm(given: Given, draft: Draft, updates: int) -> None:
    estimator = given.take("algorithm.adv_estimator", default="grpo")
    if estimator not in (*ADVANTAGES, GAE):
        why = "there is no such baseline; algorithm.advantage: group_mean is taken"
        draft.lacks("algorithm.adv_estimator", estimator, why)
    kind = given.take(f"{ACTOR}loss_type", default="default")
    if kind not in LOSSES:
        draft.lacks(f"{ACTOR}loss_type", kind, "algorithm.loss: ppo is taken; docs/algorithms.md has others")
    loss, advantage = LOSSES.get(kind, "ppo"), ADVANTAGES.get(estimator, "group_mean")
    draft.set("algorithm.loss", loss)
    draft.set("algorithm.advantage", advantage)
    if estimator == GAE:
        set_critic(given, draft, CRITIC, updates)
    if estimator == "grpo":
        draft.note(f"GRPO is algorithm.loss: {loss} with algorithm.advantage: {advantage}")
    draft.set("algorithm.clip_low", given.take(f"{ACTOR}clip_ratio_low", default=0.2))
    draft.set("algorithm.clip_high", given.take(f"{ACTOR}clip_ratio_high", default=0.3))
    draft.set("algorithm.dual_clip", given.take(f"{ACTOR}clip_ratio_dual", default=3.0))
    mean = given.take(f"{ACTOR}loss_avg_mode", default="token")
    draft.set("algorithm.aggregation", AVERAGES.get(mean, "token"))
    if mean not in AVERAGES:
        draft.lacks(f"{ACTOR}loss_avg_mode", mean, "algorithm.aggregation: token is taken")
    coefficient, kind = given.take("algorithm.kl_coef", default=1e-3), given.take("algorithm.kl_penalty")
    in_loss, disabled = given.take("algorithm.use_kl_loss"), given.take("algorithm.disable_kl")
    if in_loss and not disabled:
        draft.set("algorithm.reference_kl", coefficient)
        draft.note(f"the KL loss is algorithm.reference_kl {coefficient}, as k2, not as kl_penalty {kind}")
    elif not disabled:
        draft.lacks("algorithm.kl_coef", coefficient, "KL is a term of the loss: set algorithm.reference_kl")
    if (epochs := given.take(f"{ACTOR}ppo_epochs", default=1)) != 1:
        draft.lacks(f"{ACTOR}ppo_epochs", epochs, "a batch is trained once")
    if given.take("algorithm.online_filtering"):
        draft.set("batch.skip_zero_variance", True)
        given.take("algorithm.filter_key", "algorithm.filter_low", "algorithm.filter_high")
        draft.note("algorithm.online_filtering: batch.skip_zero_variance leaves out groups whose rewards are all equal")


def _schedule(given: Given, draft: Draft, steps: Steps) -> None:
    total, epochs = given.take("trainer.max_steps"), given.take("trainer.total_epochs", "trainer.total_episodes")
    set_versions(draft, total, epochs, steps.updates, rows_of(draft), steps.prompts)
    set_every(given, draft, steps.updates, "trainer.save_freq", "trainer.val_freq")
    kept = given.take("trainer.save_limit", default=-1)
    draft.set("learner.keep_checkpoints", kept if kept > 0 else None)
    ratio, warmup = given.take(RATIO, default=0.0), given.take(f"{ACTOR}optim.lr_warmup_steps")
    if warmup is None:
        set_warmup(draft, RATIO, ratio)
    else:
        draft.set("learner.warmup_versions", warmup * steps.updates)
    set_schedule(draft, STYLE, given.take(STYLE, default="constant"))
