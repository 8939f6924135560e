"""The run file: every key with its type, default, bound and meaning.

One YAML file describes a run and every process reads the same one (`configs.load` reads, `configs.explain` judges the
arithmetic across sections). Models are frozen and refuse unknown keys. This package imports nothing of ours.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Address = Annotated[
    str, Field(pattern=r"^tcp://(\*|[^:/]+|\[[0-9a-fA-F:.]+\]):(\*|\d{1,5})$", examples=["tcp://127.0.0.1:5600"])
]


class Section(BaseModel):
    """One section of the run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "run"
    """Name of the run and of its folder below `run.folder`."""
    folder: Path = Path("runs")
    """Where the folders of runs are; relative to the working directory."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of problem order, of sampling and of the learner."""
    versions: Positive = 100
    """Optimizer steps to take: the run ends at this policy version."""

    @property
    def path(self) -> Path:
        """The run's folder, `folder/name`."""
        return self.folder / self.name


class ModelConfig(Section):
    path: str
    """Folder of the initial model in Hugging Face format (config, tokenizer, safetensors), or its name on a hub."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute type of learner and servers, and the type weights travel in. Master weights are float32 either way."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""


class DataConfig(Section):
    train: Path
    """Problems to train on: a .parquet or .jsonl file with TinyZero/verl columns (`prompt`, `reward_model`) or EasyR1
    columns (`problem`, `answer`)."""
    eval: Path | None = None
    """Problems kept out of training, same formats; `python -m rollout evaluate` and the closing report use them."""
    format_prompt: Path | None = None
    """Jinja template around the problem text, as EasyR1 has it: `{{ content | trim }}` stands for the problem."""
    system_prompt: str | None = None
    """System message put before every prompt that has none."""
    epochs: Positive | None = None
    """Passes over the problems; null goes on for as long as `run.versions` asks."""
    shuffle: bool = True
    """Give each epoch its own order, drawn from `run.seed`; false keeps the file's order."""
    max_prompt_tokens: Positive = 1024
    """A longer prompt is not sampled; its problem is dropped with that reason."""


class RewardConfig(Section):
    function: str
    """A name from `rollout.rewards.REWARDS` (`countdown`, `math`) or your own, as `path/to/file.py:function`."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments for the reward function."""
    timeout_s: Seconds = 10.0
    """Time limit of one call; its worker process is killed at the limit and the group is failed, never scored 0."""
    workers: Positive = 1
    """Worker processes for rewards on each rollout server."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature; the learner divides by the same."""
    max_tokens: Positive = 1024
    """Longest answer in tokens; a longer one is cut and marked as truncated."""
    stop: list[str] = []
    """Texts that end an answer, each a single token of the tokenizer; that token is kept and trained on."""


class BatchConfig(Section):
    groups: Positive = 32
    """Groups (problems) in a batch: one batch takes the policy from version v to v + 1."""
    samples: Annotated[int, Field(ge=2)] = 8
    """Samples in a group: answers to one problem, generated together on one server."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Largest age in versions at which a group may be trained; 0 is synchronous. Held by admission: nothing is
    dropped."""
    target_staleness: Annotated[int, Field(ge=0)] | None = None
    """Admit as if this were the bound, for fresher data than the bound demands; null means the bound itself."""
    skip_zero_variance: bool = False
    """Leave groups whose rewards are all equal out of training; their places are refilled."""


class AlgorithmConfig(Section):
    loss: Literal["dppo", "cispo", "ppo", "decoupled", "gspo", "m2po", "topr", "reinforce"] = "dppo"
    """Policy loss; docs/algorithms.md has formula, paper and known staleness of each."""
    advantage: Literal["group_mean", "group_std", "batch_std", "leave_one_out", "reinforce_baseline"] = "group_mean"
    """How a group's rewards become advantages."""
    aggregation: Literal["token", "sequence", "prompt", "constant"] = "token"
    """Average of the loss over: all tokens; tokens then samples; tokens of a problem then problems; a constant
    length."""
    constant_length: Positive | None = None
    """Length L that `aggregation: constant` divides by, with the number of samples; null means "
    "`sampling.max_tokens`."""
    is_cap: Annotated[float, Field(gt=0)] = 5.0
    """Cap of the importance ratio learner/behaviour in `dppo` and `cispo` (an absolute value: 5 means a ratio of 5)."""
    tv_low: Annotated[float, Field(gt=0)] | None = 0.2
    """`dppo` drops a token of negative advantage once its probability fell by more than this; null: never."""
    tv_high: Annotated[float, Field(gt=0)] | None = 0.2
    """`dppo` drops a token of positive advantage once its probability rose by more than this; null: never."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """Lower clip range of `ppo` and `decoupled` (ratio 1 - clip_low). For `gspo` 3e-4 is usual."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Upper clip range of `ppo` and `decoupled` (ratio 1 + clip_high). For `gspo` 4e-4 is usual."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c of dual-clip PPO for negative advantages, 3 is usual; null turns it off."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Proximal policy of `decoupled`: the learner before its step, or interpolated by version between behaviour and
    learner."""
    behaviour_mode: Literal["clamp", "mask"] = "mask"
    """What `decoupled` does with a proximal/behaviour ratio above `behaviour_cap`: clamp it, or mask the token."""
    behaviour_cap: Annotated[float, Field(gt=0)] | None = 5.0
    """Largest proximal/behaviour ratio in `decoupled`; null: no cap."""
    m2_budget: Annotated[float, Field(gt=0)] = 0.04
    """Second-moment budget of `m2po`."""
    opsm_delta: Annotated[float, Field(gt=0)] | None = None
    """Mask samples of negative advantage whose mean behaviour - learner log-probability exceeds this (OPSM); null:
    off."""
    behaviour_kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared log-ratio to the behaviour policy; 1e-3 is usual at high staleness."""
    reference_kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the initial model, as importance-weighted k2; above 0 a frozen copy of the model is kept."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    overlong: Literal["keep", "mask", "soft"] = "keep"
    """Truncated answers: train on them, mask them out, or punish length softly over the last `overlong_buffer`
    tokens."""
    overlong_buffer: Positive = 256
    """Tokens before `sampling.max_tokens` over which the soft punishment grows from 0 to `overlong_factor`."""
    overlong_factor: Annotated[float, Field(ge=0)] = 1.0
    """Largest soft punishment, in units of reward."""


class LearnerConfig(Section):
    ranks: Positive = 1
    """Processes (on GPU: GPUs) of the learner on this machine; the model is sharded over them."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes the GPU when torch sees one."""
    threads: Positive | None = None
    """Threads of each rank for CPU arithmetic; null leaves it to torch."""
    attention: Literal["auto", "flash4", "flash", "varlen", "sdpa"] = "auto"
    """Variable-length attention: FlashAttention 4 (`pip install "flash-attn-4[cu13]"`, Hopper and later), flash-attn,
    torch's own varlen_attn, or SDPA; `auto` takes the first that works."""
    tokens_per_microbatch: Positive | Literal["auto"] = 8192
    """Tokens packed into one forward pass of a rank, without padding; `auto` fills the memory estimate."""
    head_chunk_tokens: Positive = 1024
    """Tokens whose logits exist at a time in the log-probability head."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate of AdamW after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to 10 % at `run.versions`."""
    warmup_versions: Annotated[int, Field(ge=0)] = 10
    """Versions over which the learning rate rises from 0."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient norm is clipped to this."""
    activation_checkpointing: Literal["none", "selective", "block"] = "block"
    """Recompute each transformer block in the backward pass (`block`), all of it but products and attention
    (`selective`), or keep all activations (`none`)."""
    compile: bool = False
    """Compile each transformer block with torch.compile: a minute at the start, then faster, and as lean as
    `selective`."""
    cpu_offload: bool = False
    """Keep master weights and optimizer state in host memory."""
    timeout_s: Seconds = 600.0
    """Deadline of every collective between ranks; on expiry all ranks exit and say which one was missing."""
    checkpoint_every: Positive = 20
    """Versions between checkpoints; the last version is always one."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept on disk; older ones are removed unless `keep_every` or `keep_best` holds them."""
    keep_every: Positive | None = None
    """Keep each checkpoint of a version that this divides, for ever; null keeps none for that."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Keep this many checkpoints of the highest mean reward, beside the newest."""
    export_every: Positive | None = None
    """Versions between Hugging Face exports; null exports with the last version only."""


class RolloutConfig(Section):
    servers: Positive = 1
    """Rollout servers that `python -m actors launch` starts, one vLLM engine each."""
    tensor_parallel: Positive = 1
    """GPUs of one server."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes the GPU when torch sees one."""
    groups_in_flight: Positive = 16
    """Groups that one server generates at the same time."""
    task: str = "single_turn"
    """A name from `rollout.tasks.TASKS` or your own, as `path/to/file.py:function`."""
    attempts: Positive = 3
    """Times an item is dispatched before it is dropped with the reason of its last failure."""
    heartbeat_s: Seconds = 2.0
    """Interval of a server's heartbeats; its leases end after five missed ones."""
    engine: dict[str, Any] = {}
    """Handed to vLLM's AsyncEngineArgs as it is, e.g. `{max_model_len: 4096, gpu_memory_utilization: 0.9}`."""


class WeightsConfig(Section):
    host: str = "127.0.0.1"
    """Interface on which learner rank 0 serves policies; its port is free and told to the servers by the buffer."""
    transport: Literal["broadcast", "safetensors"] = "broadcast"
    """`broadcast`: NCCL between GPUs, gloo between CPUs. `safetensors`: files in the run's folder, which all servers
    must see; for servers that NCCL cannot reach."""
    staging: Literal["auto", "full", "bucket"] = "auto"
    """Where a server receives: into a whole copy of the weights beside the engine while it generates (`full`), or
    bucket by bucket into place while it is paused (`bucket`); `auto` takes the copy where there is room for it."""
    bucket_mib: Annotated[int, Field(ge=1, le=8192)] = 1024
    """Size of the buckets in which weights travel; a larger tensor has one of its own. A server without room for a
    whole copy takes two."""
    timeout_s: Seconds = 60.0
    """Longest wait for a server to get ready for, receive and load a policy; a server beyond it is left out and may
    rejoin."""
    probe_every: Annotated[int, Field(ge=0)] = 10
    """Versions between checks of a fixed text's log-probabilities, server against learner; 0 checks checksums only."""
    probe_tolerance: Annotated[float, Field(gt=0)] = 0.05
    """Largest mean absolute difference of those log-probabilities, in nat. Right weights in bfloat16 differ by about
    0.01, those of a large random model by 0.05; in float32 set 1e-3."""


class BufferConfig(Section):
    address: Address = "tcp://127.0.0.1:5600"
    """Where the buffer listens and all others find it. Beyond loopback ZeroMQ CURVE keys are required."""
    path: Path | None = Path("buffer.sqlite")
    """SQLite file of the ledger, relative to the run's folder; null keeps it in memory and loses it with the
    process."""
    fsync: bool = True
    """Wait for the disk at each commit: survives a power cut, not only a killed process."""
    keep: Literal["checkpoints", "all"] = "checkpoints"
    """Trained samples: remove those older than the oldest kept checkpoint, or keep all as provenance."""
    max_gib: Annotated[float, Field(gt=0)] = 8.0
    """Bytes of stored samples not yet trained above which servers wait with their groups (back-pressure)."""
    max_message_mib: Annotated[int, Field(ge=1, le=4096)] = 256
    """Largest message accepted."""


class LogConfig(Section):
    trackers: list[Literal["tensorboard", "wandb", "swanlab"]] = []
    """Loggers that read metrics.jsonl; one that fails costs a warning, never the run."""
    display: Literal["auto", "rich", "plain"] = "auto"
    """Terminal display of `python -m actors launch`; `auto` is rich on a terminal and plain lines elsewhere."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    sampling: SamplingConfig = SamplingConfig()
    batch: BatchConfig = BatchConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    rollout: RolloutConfig = RolloutConfig()
    weights: WeightsConfig = WeightsConfig()
    buffer: BufferConfig = BufferConfig()
    log: LogConfig = LogConfig()
