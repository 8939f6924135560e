"""The run file: every key with its type, default, bound and meaning. This package imports no other one of Headrace."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

Positive = Annotated[int, Field(ge=1)]
Blocks = Annotated[int, Field(ge=1, strict=True)]
Held = Annotated[int, Field(ge=0, strict=True)]
Weight = Annotated[float, Field(gt=0, le=1e6)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
OwnFunction = Annotated[str, Field(pattern=r"\.py:[A-Za-z_]\w*$", examples=["path/to/file.py:function"])]
Address = Annotated[
    str,
    Field(
        pattern=r"^(ipc://buffer|tcp://(\*|[^:/]+|\[[0-9a-fA-F:.]+\]):(\*|\d{1,5}))$",
        examples=["ipc://buffer", "tcp://127.0.0.1:5600"],
    ),
]
BUFFER_PORT = 5600
"""Port of a buffer whose address a launch chooses."""
MOST_MESSAGE_MIB = 4096
NO_REWARD = "none"
"""`reward.function` of a run without a reward: supervised fine-tuning, or a teacher alone."""
PROBE_TOLERANCE, QUANTISED_PROBE_TOLERANCE = 0.05, 1.0


class Section(BaseModel):
    """One section of the run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "run"
    """Name of the run and of its folder below `run.folder`."""
    folder: Path = Path("runs")
    """Folder for the folders of runs; relative to the working directory."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of problem order, sampling and the learner."""
    versions: Positive = 100
    """Optimizer steps: the run ends at this policy version."""

    @property
    def path(self) -> Path:
        return self.folder / self.name


class LoraConfig(Section):
    """Train an adapter beside linear layers of the text model, in place of the weights themselves."""

    rank: Annotated[int, Field(ge=1, le=512)] = 32
    """Rank of each layer's change."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The change is `alpha / rank` times the product of the two matrices; null: `rank`, a factor of 1."""
    targets: Literal["all"] | list[str] = "all"
    """Linear layers of the text model's blocks that get an adapter, by the last word of their names, such as `[q_proj,
    v_proj]`, or `all`."""

    @field_validator("alpha")
    @classmethod
    def _null_for_one(cls, alpha: float | None, known: ValidationInfo) -> float | None:
        return None if alpha == known.data.get("rank") else alpha

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


class ModelConfig(Section):
    path: str
    """Folder of the initial model in Hugging Face format (config, tokenizer, safetensors), or its name on the hub."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of learner and servers, and dtype of weights on the wire. Master weights are always float32."""
    trust_remote_code: bool = False
    """Run the model's own Python code. Set it only if you have read that code."""
    freeze: list[Literal["vision", "projector"]] = []
    """Parts of a vision-language model that are not trained: `vision`, the tower that reads images, or the `projector`
    behind it. Frozen parts need no gradients and optimizer state, and are sent to each server once."""
    text_alone: bool = False
    """Train a model that reads images on text alone: tower and projector are frozen and never computed, and servers
    build none (docs/text-alone.md)."""
    lora: LoraConfig | None = None
    """Train an adapter of low rank: `{}` for all defaults, null trains the weights. Only the adapter has gradients and
    optimizer state, is sent to servers and is saved; the weights are held in `dtype` (docs/lora.md)."""


class MixedSource(Section):
    """A source of problems beside others."""

    path: Path
    """A file, folder, glob or set of reasoning-gym, as for `data.train`."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Its weight among problems that are drawn; null for all sources: by number of rows."""
    columns: dict[str, str] | None = None
    """Its own `data.columns`; null: those of the run."""


class EvalSet(Section):
    """One set of problems to evaluate on; `data.eval` has them by name."""

    path: Path
    """Problems kept out of training, named as in `data.train`."""
    samples: Positive = 1
    """Answers to each problem."""
    k: list[Positive] = []
    """Attempts k for which pass@k (one of k is solved) and pass^k (all k are) are estimated; at most `samples`."""
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """Sampling temperature, 0 is greedy; null: greedy for one sample, `sampling.temperature` for several."""
    max_tokens: Positive | None = None
    """Longest answer in tokens; null: `sampling.max_tokens`."""
    limit: Positive | None = None
    """Evaluate on the first so many problems; null: all."""

    def temperature_of(self, run: "SamplingConfig") -> float:
        return (run.temperature if self.samples > 1 else 0.0) if self.temperature is None else self.temperature


class DifficultyConfig(Section):
    """Draw problems by the share of their samples that were solved so far; docs/difficulty.md says more."""

    unseen: Weight = 0.3
    """Share of draws for problems without a group yet."""
    unsolved: Weight = 0.1
    """Share of draws for problems with no solved sample."""
    between: Weight = 0.5
    """Share of draws for problems with some samples solved, others not."""
    solved: Weight = 0.1
    """Share of draws for problems with all samples solved. The four shares are weights: their sum need not be 1. A band
    without a problem to draw leaves its draws to the others."""
    solved_at: float = 1.0
    """Least reward of a solved sample."""
    groups: Positive = 2
    """Groups in a row with all samples solved after which a problem is retired. Groups before them no longer count for
    its band, nor do those before as many groups without a solved sample."""
    rest: Annotated[int, Field(ge=0)] = 4
    """Versions before a problem is drawn again, as long as there are others."""
    return_after: Positive = 50
    """Further versions before a retired problem may be drawn again, among the solved ones."""

    @property
    def shares(self) -> dict[str, float]:
        return {"unseen": self.unseen, "unsolved": self.unsolved, "between": self.between, "solved": self.solved}


class DemonstrationsConfig(Section):
    """Demonstrations that are trained beside the samples of each batch; docs/sft.md says more."""

    path: Path | Annotated[list[MixedSource], Field(min_length=1)]
    """Rows as for `python -m learner sft`: prompt and answer, or messages."""
    share: Annotated[float, Field(gt=0, le=0.9)] = 0.1
    """Share of a batch that is demonstrations: 28 beside 256 samples are 0.1."""
    weight: Annotated[float, Field(gt=0)] = 0.1
    """Factor of their loss, the mean of -log p over their trained tokens."""
    turns: Literal["all", "last", "flagged"] = "all"
    """Answers that are trained where a row has `messages`, as in `sft.turns`."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Rows longer than the longest sample: refuse the run, or leave them out and count them."""

    def rows(self, samples: int) -> int:
        return max(1, round(self.share / (1.0 - self.share) * samples))


class DataConfig(Section):
    train: Path | Annotated[list[MixedSource], Field(min_length=1)]
    """Problems to train on: a file (parquet, jsonl, json, csv, tsv), a folder or glob of such files, a set of
    reasoning-gym as `reasoning_gym:leg_counting?size=10000&seed=1`, or a list of these as `{path, weight}`. Rows have
    TinyZero/verl columns (`prompt`, `reward_model`) or EasyR1 columns (`problem`, `answer`); see docs/data.md."""
    eval: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], EvalSet] = {}
    """Sets of problems kept out of training, by name, for `python -m rollout evaluate` and `eval.every`. A path alone
    is one set named `eval`, with one greedy answer to each problem."""
    chat_template: Literal["none"] | Path | None = None
    """Jinja file, or `none` for a base model (the messages' texts joined by blank lines); null: the tokenizer's own."""
    format_prompt: Path | None = None
    """Jinja template around the problem text, as in EasyR1; `{{ content | trim }}` is the problem."""
    system_prompt: str | None = None
    """System message for every prompt that has none."""
    columns: dict[str, str] = {}
    """Names of columns, by Headrace's names: with `{problem: question}` the column `question` is the `problem`. For
    `data.eval` too."""
    epochs: Positive | None = None
    """Passes over the problems; null repeats them until `run.versions`. An epoch of weighted sources has as many
    problems as their rows together."""
    shuffle: bool = True
    """Shuffle each epoch anew, seeded by `run.seed`; false keeps the files' order."""
    difficulty: DifficultyConfig | None = None
    """Draw problems by how hard they are: those solved by some samples most often, those solved by all seldom. `{}` for
    all defaults; null draws each once an epoch (docs/difficulty.md)."""
    demonstrations: DemonstrationsConfig | None = None
    """Train on demonstrations beside the samples of each batch (docs/sft.md); null: on samples only."""
    max_prompt_tokens: Positive = 1024
    """Longest prompt in tokens, its images' included; a problem with a longer one is dropped with that reason."""
    image_dir: Path | None = None
    """Folder that paths of images are relative to; null: the data file's. The buffer reads each image when its row is
    dispatched."""
    min_pixels: Positive | None = None
    """Fewest pixels of an image as the model sees it: a smaller one is enlarged. null: the image processor's value."""
    max_pixels: Positive | None = 1_048_576
    """Most pixels of an image as the model sees it: a larger one is made smaller, but no side shorter than a token's,
    which is 28 pixels with Qwen2.5-VL and 32 with Qwen3-VL and Qwen3.5. Gemma 3 makes every image a square of 896 x 896
    pixels, 256 tokens. null: the image processor's value, often 16,384 tokens."""
    max_images: Positive = 8
    """Most images of one sample, later turns included; a row with more is refused."""

    @field_validator("eval", mode="before")
    @classmethod
    def _one_set(cls, given: Any) -> Any:
        alone = {"eval": {"path": str(given)}} if isinstance(given, str | Path) else given
        return {} if alone is None else alone

    def sources(self) -> dict[str, Path | list[MixedSource]]:
        """Sources by key below `data`: `train`, and `eval` or `eval.NAME`."""
        sets = {"eval" if name == "eval" else f"eval.{name}": each.path for name, each in self.eval.items()}
        return {"train": self.train, **sets}


class RewardPart(Section):
    """A reward function beside others."""

    function: str
    """A built-in reward or your own, as `path/to/file.py:function`."""
    weight: float = 1.0
    """Factor of its result in the sum; 0 makes it a metric only."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments for it."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    """Its metric; null: the name of the function."""

    @property
    def metric(self) -> str:
        return self.name or self.function.rpartition(":")[2]

    @property
    def uses_servers(self) -> bool:
        return self.function == "reward_model" and "url" not in self.kwargs


class RewardConfig(Section):
    function: str | Annotated[list[RewardPart], Field(min_length=1)]
    """A built-in reward (`countdown`, `math_verify` alias `math`, `exact_match`, `regex`, `length`, `judge`,
    `reward_model`) or your own, as `path/to/file.py:function`. Several: a list of `{function, weight, kwargs, name}`;
    the reward is the sum of their results times `weight` (1), and each is a metric by its `name`."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments for one reward function; several have theirs in their list."""
    timeout_s: Seconds = 10.0
    """Time limit of one call. Then its worker process is killed (an `async` call is cancelled) and the group fails; it
    is never scored 0."""
    concurrency: Positive = 64
    """Calls of an `async` reward function that one worker runs at a time; of other functions it runs one."""
    workers: Positive = 1
    """Reward workers (processes) per rollout server and function."""
    model: str | None = None
    """Sequence classification model of the run's own reward servers, by folder or hub name."""
    servers: Annotated[int, Field(ge=0)] = 0
    """Reward servers that `python -m actors launch` starts for `reward_model`, each with a copy of `reward.model`."""
    host: str = "127.0.0.1"
    """Address of this machine on which reward servers listen and rollout servers reach them."""
    port: Annotated[int, Field(ge=1, le=65535)] = 5700
    """Port of the first reward server; further ones follow."""
    engine: dict[str, Any] = {}
    """Arguments of vLLM for the reward servers, e.g. `{max_model_len: 4096, gpu_memory_utilization: 0.9}`; each takes
    `tensor_parallel_size` GPUs."""
    memory_gib: Annotated[float, Field(gt=0)] = 8.0
    """Memory of one worker and all processes it starts; beyond it they are killed and the group fails."""
    max_calls: Positive | None = None
    """Calls after which a new process replaces a worker, for functions that leak; null: never."""

    @property
    def parts(self) -> list[RewardPart]:
        if isinstance(self.function, str):
            return [RewardPart(function=self.function, kwargs=self.kwargs)]
        return self.function

    @property
    def gpus(self) -> int:
        return int(self.engine.get("tensor_parallel_size", 1))

    @property
    def urls(self) -> list[str]:
        return [f"http://{self.host}:{self.port + number}" for number in range(self.servers)]


class TeacherModel(Section):
    """A fixed model whose log-probabilities of the sampled tokens the policy learns from."""

    model: str | None = None
    """The teacher's folder in Hugging Face format, such as an earlier export of the policy, or its name on the hub.
    With `url`, the name under which that server knows it."""
    url: str | Annotated[list[str], Field(min_length=1)] | None = None
    """Address of a vLLM server of the teacher, such as `http://127.0.0.1:8000` without `/v1`, or several of the same
    model; null: the run's own servers (`servers`)."""
    tokenizer: str | None = None
    """Folder or hub name of the teacher's tokenizer, whose vocabulary is compared with the policy's; null: `model`."""
    servers: Annotated[int, Field(ge=0)] = 0
    """Teacher servers that `python -m actors launch` starts, each with a copy of `model`."""
    weight: Annotated[float, Field(gt=0, le=1e3)] = 1.0
    """A token's advantage gains this times the teacher's log-probability less the policy's; with `top_k`, the loss
    gains this times the divergence."""
    api_key_env: str | None = None
    """Environment variable with the API key of `url`; null: no key is sent."""
    engine: dict[str, Any] = {}
    """Arguments of vLLM for the teacher's servers, e.g. `{gpu_memory_utilization: 0.9}`; each takes
    `tensor_parallel_size` GPUs."""

    @property
    def gpus(self) -> int:
        return int(self.engine.get("tensor_parallel_size", 1))

    @property
    def named(self) -> bool:
        return self.model is not None or self.url is not None


class SourceTeacher(TeacherModel):
    """The teacher of some rows of the data."""

    data_source: Annotated[str, Field(pattern=r"^[!-~][ -~]{0,199}$", examples=["openai/gsm8k"])]
    """The rows whose column `data_source` has this value."""


class TeacherConfig(TeacherModel):
    """On-policy distillation (docs/teachers.md)."""

    by_source: list[SourceTeacher] = []
    """Teachers of the rows of one `data_source` each, as `{data_source: math, model: ..., servers: 1}`. Other rows have
    the teacher of `teacher.model` or `teacher.url`, if any."""
    top_k: Annotated[int, Field(ge=1, le=64)] | None = None
    """Learn from the teachers' so many most probable tokens in place of the sampled one: the loss gains `weight` times
    the reverse KL of the policy to the teacher over these and all others as one, and the advantages gain nothing. null:
    the policy-gradient form, with the sampled tokens alone."""
    host: str = "127.0.0.1"
    """Address of this machine on which teacher servers listen and rollout servers reach them."""
    port: Annotated[int, Field(ge=1, le=65535)] = 5800
    """Port of the first teacher server; further ones follow."""
    timeout_s: Seconds = 300.0
    """Time limit of one request, which scores a whole group."""
    retries: Annotated[int, Field(ge=0)] = 4
    """How often a request is tried again. Then the attempt at the group has failed; it never counts as 0."""

    @property
    def teachers(self) -> dict[str, TeacherModel]:
        """All teachers by the `data_source` of their rows; "" for all other rows."""
        found: dict[str, TeacherModel] = {"": self} if self.named else {}
        found.update({each.data_source: each for each in self.by_source})
        return found

    @property
    def all_gpus(self) -> int:
        return sum(each.servers * each.gpus for each in self.teachers.values())

    @property
    def served(self) -> list[str]:
        """The `data_source` of each own teacher server, by number."""
        return [source for source, each in self.teachers.items() for _ in range(each.servers)]

    def urls_of(self, source: str) -> list[str]:
        given = self.teachers[source].url
        if given is not None:
            return [given] if isinstance(given, str) else given
        return [f"http://{self.host}:{self.port + number}" for number, own in enumerate(self.served) if own == source]


class SamplingConfig(Section):
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature; the learner divides its logits by it too."""
    max_tokens: Positive = 1024
    """Longest answer in tokens; a longer one is cut off and marked as truncated."""
    stop: list[str] = []
    """Strings that end an answer, each a single token; that token is kept and trained on."""


class BatchConfig(Section):
    groups: Positive = 32
    """Groups (problems) per batch, which takes the policy from version v to v + 1."""
    samples: Annotated[int, Field(ge=2)] = 8
    """Samples per group: answers to one problem, generated on one server."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Largest age in versions at which a group may be trained; 0 is synchronous. Admission enforces it: no group is
    dropped for its age."""
    target_staleness: Annotated[int, Field(ge=0)] | None = None
    """Admit work as if this were the bound, for fresher data; null: the bound."""
    skip_zero_variance: bool = False
    """Leave groups whose rewards are all equal out of training; others take their place. The run is given up after
    1,000 such groups in a row, or 10 batches of them if that is more. `data.difficulty` makes them fewer."""


class CriticConfig(Section):
    """The critic of `algorithm.advantage: gae`: a second copy of `model.path` with a linear layer to one number,
    trained with the keys of `learner` but for these."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate of the critic's AdamW, constant."""
    warmup_versions: Annotated[int, Field(ge=0)] = 0
    """Versions in which the critic alone is trained, before the policy's learning rate begins to rise."""
    updates: Annotated[int, Field(ge=1, le=16)] = 1
    """Optimizer steps of the critic on each batch; advantages are those before the first one."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Largest distance, in units of reward, by which a token's value gains from moving within a batch (PPO's value
    clipping); needs `updates` above 1. null: off."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of what comes after a turn; tokens of one turn are not discounted."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of GAE, over turns: 1 trusts the rewards that came, 0 the critic's value of the next turn's start."""
    whiten: bool = True
    """Bring advantages to mean 0 and standard deviation 1 over all sampled tokens of the batch."""


class AlgorithmConfig(Section):
    loss: Literal["dppo", "cispo", "ppo", "decoupled", "gspo", "m2po", "topr", "reinforce"] | OwnFunction = "dppo"
    """Policy loss, or your own as `path/to/file.py:function`; docs/algorithms.md has formula, paper and known
    staleness."""
    advantage: (
        Literal["group_mean", "group_std", "batch_std", "leave_one_out", "reinforce_baseline", "gae"] | OwnFunction
    ) = "group_mean"
    """How a group's rewards become advantages, or your own as `path/to/file.py:function`. `gae` trains a critic instead
    (docs/critic.md)."""
    critic: CriticConfig = CriticConfig()
    turn_discount: Annotated[float, Field(ge=0, le=1)] | None = None
    """Credit a turn with the rewards from it on, those of k turns later times this to the power k, less the group's
    baseline; needs `advantage: group_mean` or `leave_one_out`. null: every turn gets its sample's advantage."""
    aggregation: Literal["token", "sequence", "prompt", "constant"] = "token"
    """What the loss is averaged over: all tokens; the tokens of a sample, then samples; the tokens of a problem, then
    problems; or a constant length."""
    constant_length: Positive | None = None
    """Length L in tokens: `aggregation: constant` divides by L times the number of samples; null:
    `sampling.max_tokens`."""
    is_cap: Annotated[float, Field(gt=0)] = 5.0
    """Cap of the importance ratio learner/behaviour in `dppo` and `cispo` (5: a ratio of 5)."""
    tv_low: Annotated[float, Field(gt=0)] | None = 0.2
    """`dppo` drops a token of negative advantage whose probability has fallen by more than this; null: never."""
    tv_high: Annotated[float, Field(gt=0)] | None = 0.2
    """`dppo` drops a token of positive advantage whose probability has risen by more than this; null: never."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """Lower clip range of `ppo` and `decoupled` (ratio 1 - clip_low). For `gspo` 3e-4 is usual."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Upper clip range of `ppo` and `decoupled` (ratio 1 + clip_high). For `gspo` 4e-4 is usual."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c of dual-clip PPO for negative advantages, 3 is usual; null: off."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Proximal policy of `decoupled`: the learner before its step (`recompute`), or an interpolation by version between
    behaviour and learner (`loglinear`)."""
    behaviour_mode: Literal["clamp", "mask"] = "mask"
    """What `decoupled` does above `behaviour_cap`: clamp the ratio, or mask the token."""
    behaviour_cap: Annotated[float, Field(gt=0)] | None = 5.0
    """Largest proximal/behaviour ratio in `decoupled`; null: no cap."""
    m2_budget: Annotated[float, Field(gt=0)] = 0.04
    """Largest mean squared log-ratio (second moment) of the tokens that `m2po` trains on."""
    opsm_delta: Annotated[float, Field(gt=0)] | None = None
    """Mask samples of negative advantage whose mean behaviour - learner log-probability exceeds this (OPSM); null: off.
    """
    behaviour_kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared log-ratio to the behaviour policy; 1e-3 is usual at high staleness."""
    reference_kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the initial model, as importance-weighted k2; above 0 a frozen copy of that model is kept."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    overlong: Literal["keep", "mask", "soft"] = "keep"
    """Truncated answers: train on them, mask them, or subtract a length penalty that grows over the last
    `overlong_buffer` tokens (`soft`)."""
    overlong_buffer: Positive = 256
    """Tokens before `sampling.max_tokens` over which the soft penalty grows from 0 to `overlong_factor`."""
    overlong_factor: Annotated[float, Field(ge=0)] = 1.0
    """Largest soft penalty, in units of reward."""


class SftConfig(Section):
    """Supervised fine-tuning, by `python -m learner sft`."""

    rows: Positive | None = None
    """Rows of `data.train` in a batch, which takes the policy from version v to v + 1; null: the run is reinforcement
    learning."""
    turns: Literal["all", "last", "flagged"] = "all"
    """Answers that are trained where a row has `messages`: all, the last one, or those with `train: true` (`flagged`).
    A row of prompt and answer has its answer trained."""
    max_tokens: Positive | Literal["auto"] = "auto"
    """Longest row in tokens; `auto`: as the model's positions, and `learner.tokens_per_microbatch` if a number,
    allow."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Longer rows: refuse the run, naming the first, or leave them out and count them."""


class LearnerConfig(Section):
    ranks: Positive = 1
    """Processes of the learner on all its nodes, one per GPU; the model is sharded over those of a node."""
    nodes: Positive = 1
    """Machines with an equal number of ranks each. Each replicates the model, and gradients are reduced between them
    once a version (docs/several-nodes.md)."""
    shard: Positive | None = None
    """Ranks that share one copy of the model: fewer than a node's for small models, those of several nodes for one that
    does not fit a node; null: a node's."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes the GPU if torch sees one."""
    threads: Positive | None = None
    """CPU threads per rank; null: as torch chooses."""
    attention: Literal["auto", "flash4", "flash", "varlen", "sdpa"] = "auto"
    """Variable-length attention: FlashAttention 4 (`pip install "flash-attn-4[cu13]"`, Hopper and later), flash-attn,
    torch's varlen_attn, or SDPA; `auto` takes the first that works."""
    tokens_per_microbatch: Positive | Literal["auto"] = "auto"
    """Tokens packed into one forward pass of a rank, without padding; `auto` takes as many as fit the memory, at most
    the rank's share of a batch."""
    context_parallel: Positive = 1
    """Consecutive ranks that share each microbatch, each with an equal slice of its tokens, for documents longer than
    one GPU holds. Around attention tokens and heads are exchanged (Ulysses), so the number divides the attention heads
    (docs/long-documents.md)."""
    share_prompts: bool | Literal["prompts"] = True
    """Compute once what samples of a group in one microbatch have in common: their prompt and, where that saves more
    tokens, each longer prefix, as of an agent's turns and forks (`prompts`: prompts alone). Results change by rounding
    only; the learner's log says what a model or a setting does not allow."""
    gather: Literal["auto", "pass", "batch"] | Held = "auto"
    """When shards of weights are gathered and gradients reduced: block by block in each forward and backward pass
    (`pass`, the least memory), or once a batch (`batch`: all weights in `model.dtype` and unsharded fp32 gradients
    stay). A number lies between: what lies outside of the blocks (embedding, head) is gathered and reduced once a
    batch; the last so many blocks are gathered once a batch, and their gradients reduced in each backward pass. `auto`
    takes `batch` on CPU and `pass` with `cpu_offload: true`. On a GPU it takes the most that costs little memory and
    leaves nearly the same microbatches (docs/fits.md)."""
    head_chunk_tokens: Positive | Literal["auto"] = "auto"
    """Tokens whose logits the log-probability head holds at a time. `auto` takes 4096 on a GPU, or 1024 where
    microbatches of 8,192 tokens do not fit otherwise; 1024 on CPU."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate of AdamW after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or decaying to 10 % at `run.versions`."""
    warmup_versions: Annotated[int, Field(ge=0)] = 10
    """Versions over which the learning rate rises from 0."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's beta1 and beta2."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global norm to which the gradient is clipped."""
    activation_checkpointing: Literal["auto", "none", "selective", "block", "offload"] | Blocks = "auto"
    """Recompute each transformer block in the backward pass (`block`; with `offload` its input waits in pinned host
    memory), the first so many blocks (a number), in each block all but matmuls and attention (`selective`), or keep
    all activations (`none`). `auto` takes the fastest that fits microbatches of 8,192 tokens, or of
    `tokens_per_microbatch`, but never `offload`; on CPU `block`."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each transformer block with torch.compile, which takes a minute at the start; steps are then faster and
    need as little memory as with `selective`. `auto` compiles on GPUs if the run has 20 versions or more, or with
    `matmul: fp8`, but not with `cpu_offload: true`."""
    matmul: Literal["bfloat16", "fp8"] = "bfloat16"
    """Precision in which the blocks' linear layers multiply: forward and both gradients. `fp8` casts each factor to
    e4m3 with a scale for each row, which rounds more (docs/fp8.md); head, embeddings, norms and attention stay in
    bfloat16. It needs compute capability 8.9 or later (Ada, Hopper), and is compiled."""
    cpu_offload: bool | Literal["optimizer"] = False
    """Keep in host memory master weights and optimizer state, which each step brings to the GPU in parts (`optimizer`:
    12 bytes a trained parameter; weights in `model.dtype` and gradients stay on the GPU), or weights, gradients and
    optimizer state (`true`, the least GPU memory; each pass fetches the weights, and the processor updates them)."""
    timeout_s: Seconds = 600.0
    """Timeout of every collective between ranks; on expiry all ranks exit and log which one was missing."""
    checkpoint_every: Positive = 20
    """Versions between checkpoints; the last version always gets one."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints to keep, besides those of `keep_every` and `keep_best`."""
    keep_every: Positive | None = None
    """Keep every checkpoint whose version is a multiple of this; null: none for that reason."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Checkpoints with the highest mean reward to keep, in addition to the newest."""
    export_every: Positive | None = None
    """Versions between Hugging Face exports; null: the last version only."""
    checkpoint_on: Literal["shared", "first_node"] = "shared"
    """Where checkpoints of several `nodes` are: in a `run.folder` that all share, each rank writing its shards
    (`shared`), or on the first node's disk, whose ranks write a whole copy and lose it with that machine
    (`first_node`)."""


class ChatConfig(Section):
    tool_parser: str | None = None
    """vLLM's parser of tool calls in an answer, such as `hermes` or `llama3_json`; `auto`: the one that fits chat
    template and model type; null: they stay text."""
    reasoning_parser: str | None = None
    """vLLM's parser of reasoning in an answer, such as `qwen3` or `deepseek_r1`; `auto`: the one that fits; null: it
    stays text."""
    thinking: bool | Literal["auto"] = "auto"
    """Whether the model thinks before it answers, by its chat template's own switch: `off` is `enable_thinking: false`
    for Qwen 3 and `thinking: false` for DeepSeek-V3.1; `auto`: the template's default. For every task."""
    template_kwargs: dict[str, Any] = {}
    """Further arguments of the chat template, such as `{reasoning_effort: low}`, for every task, `single_turn`
    included."""
    max_turns: Positive = 64
    """Answers of the model in one episode; then it ends as truncated."""
    max_tokens: Positive | None = None
    """Tokens of one episode, sampled and given, over all its segments; null: four times the longest sample
    (`rollout.max_sample_tokens`). One call never sees more."""
    history: Literal["fork", "keep"] = "fork"
    """Where the chat template would write earlier turns anew, such as without their thinking: `fork` begins a new
    segment, as a server of that model would see it; `keep` goes on with the tokens as they are."""
    timeout_s: Seconds | None = None
    """Wall-clock time of one episode; then it ends as truncated. null: none."""
    host: str = "127.0.0.1"
    """Interface on which a server takes requests of agents; `0.0.0.0`: all."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port for them; 0: a free one, which several servers on one machine need."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^/\s]+")] | None = None
    """What agents elsewhere, such as in sandboxes, have before `/e/KEY/v1`; null: `http://host:port`."""


class AgentConfig(Section):
    """A program that knows an OpenAI base URL and nothing else."""

    command: list[str] = []
    """The program with its arguments, for `rollout.task: agent`. It gets the row as JSON on its standard input, and
    `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment. Its last line is `{"score": ...}` or a number."""


class EnvironmentConfig(Section):
    """An environment of the `verifiers` library, for `rollout.task: environment`."""

    id: str | None = None
    """Its name, as it was installed."""
    args: dict[str, Any] = {}
    """Keyword arguments of its `load_environment`, or, of a task set (`verifiers.v1`), its config, such as `{taskset:
    {level: 2}, agent: {max_turns: 8}}`."""
    python: Path | None = None
    """The Python that it is installed in, such as `envs/wordle/bin/python`: not Headrace's."""


class ServerRange(Section):
    """A number of servers that follows from who waits for whom."""

    min: Positive = 1
    """Fewest servers, with which the run starts."""
    max: Positive
    """Most servers, as far as Ray has GPUs for them."""


class RolloutConfig(Section):
    servers: Positive | ServerRange = 1
    """Rollout servers that `python -m actors launch` starts, one vLLM engine each. With `{min: 1, max: 8}` the run adds
    some while the learner waits, and gives back those that wait for the learner. `python -m actors scale` changes the
    number during the run."""
    tensor_parallel: Positive = 1
    """GPUs per server."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes the GPU if torch sees one."""
    sequences: Literal["auto"] | Positive = "auto"
    """Samples that one server generates at a time, each until its task has ended; it asks for groups while it has a
    place. `auto` begins with the server's share of a batch and takes more while the learner waits, as far as KV cache
    and CUDA graphs reach. More are faster, and older when they are trained."""
    task: str = "single_turn"
    """A built-in task (`single_turn`, `agent`, `environment`) or your own, as `path/to/file.py:function`. Its
    parameters decide what it gets: `(problem, generate)` tokens, `(row, chat)` messages, `(row, base_url, api_key)` a
    URL."""
    chat: ChatConfig = ChatConfig()
    agent: AgentConfig = AgentConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sample_attempts: Positive = 2
    """How often a server tries one sample whose task failed, from the beginning, before the attempt at its group has
    failed."""
    max_sample_tokens: Positive | None = None
    """Longest whole sample of your own task in tokens: prompt, all turns, and what the task gave; null:
    `rollout.engine.max_model_len`, or one prompt and one answer if that is not set either."""
    task_timeout_s: Seconds = 60.0
    """Time that your own task may spend on one sample outside of model calls; then the sample has failed."""
    task_memory_gib: Annotated[float, Field(gt=0)] = 8.0
    """Memory of one task worker and all processes it starts, or of one sample's agent if that has processes of its own;
    beyond it they are killed, and their samples have failed."""
    task_workers: Positive = 2
    """Processes per rollout server that run your own task, many samples at a time each."""
    attempts: Positive = 3
    """How often an item is dispatched before it is dropped with the reason of its last failure. A row that made no
    group and failed so often by its reward, task or prompt is left out of later epochs."""
    max_failed_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The run is given up, with exit code 1, once 100 attempts, or 3 batches of them if that is more, have failed since
    a group was made, and they are more than this share of the attempts since then, running ones included. Failures of
    the infrastructure do not count; 1: never."""
    heartbeat_s: Seconds = 2.0
    """Interval between heartbeats of a server; its leases end after five missed ones."""
    drain_s: Seconds = 30.0
    """Time in which a server that is to end may finish its groups; others make those that it gives back."""
    routing_replay: bool = False
    """Servers send the experts that they chose for each token, and the learner computes with these; for models with
    experts, on GPUs. Otherwise the two sometimes choose differently, which is most of their difference."""
    engine: dict[str, Any] = {}
    """Passed to vLLM's AsyncEngineArgs unchanged, e.g. `{max_model_len: 4096, gpu_memory_utilization: 0.9}`."""

    @property
    def least_servers(self) -> int:
        return self.servers.min if isinstance(self.servers, ServerRange) else self.servers

    @property
    def most_servers(self) -> int:
        return self.servers.max if isinstance(self.servers, ServerRange) else self.servers


class WeightsConfig(Section):
    host: str = "127.0.0.1"
    """Interface on which learner rank 0 serves policies, on a free port that servers get from the buffer."""
    transport: Literal["broadcast", "safetensors"] = "broadcast"
    """`broadcast`: NCCL between GPUs, gloo between CPUs. `safetensors`: files in the run's folder, which all servers
    must see; for servers that NCCL cannot reach."""
    publish: Literal["auto", "gather", "rows"] = "auto"
    """Who sends: rank 0, which gathers and holds two whole copies (`gather`); or each rank its own rows, holding its
    share of two copies (`rows`), so that larger models fit. `auto` takes `rows` where several ranks share the model,
    rank 0 saves more memory than a server needs for the connections, and the model is a Llama, Qwen2, Qwen3 or
    Qwen3-MoE."""
    staging: Literal["auto", "full", "slices", "bucket"] = "auto"
    """Where a server receives: into a second copy of the weights while the engine generates (`full`), into a copy of
    what each of its workers loads (`slices`), or bucket by bucket into the weights of the paused engine (`bucket`).
    `auto` takes the smaller copy that is possible, if there is memory for it."""
    bucket_mib: Annotated[int, Field(ge=1, le=8192)] = 1024
    """Size of the buckets in which weights travel; a larger tensor gets its own. A server without memory for a whole
    copy allocates two buckets. With `publish: rows` buckets are as many times larger as there are ranks, at most four
    times, and a server also allocates two of a rank's shares of them."""
    timeout_s: Seconds = 60.0
    """Longest wait for a server to prepare for, receive and load a policy; a slower one is left out and may rejoin."""
    probe_every: Annotated[int, Field(ge=0)] = 10
    """Versions between comparisons of a fixed text's log-probabilities, server to learner; 0: checksums only. The first
    comparison of each server has uncertain texts too."""
    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest mean absolute difference of those log-probabilities, in nats; null: 0.05, in bfloat16 plus 1/64 of their
    mean absolute value, or 1 with `rollout.engine.quantization` or `learner.matmul: fp8`. Correct weights differ by
    about 0.01 in bfloat16, by 0.05 in a large random model, by 0.6 to 0.8 if rounded to FP8; wrong ones by 2.6. In
    float32 set 1e-3. Uncertain texts may also differ by their rounding, in bfloat16 by 1/4 plus 1/64 of their mean
    absolute value."""

    @property
    def tolerance(self) -> float:
        """`Config` has set the default of an end that multiplies in FP8."""
        return self.probe_tolerance or PROBE_TOLERANCE


class BufferConfig(Section):
    address: Address = "ipc://buffer"
    """Where the buffer listens and others connect: a Unix socket in the run's folder, for processes of one machine, or
    `tcp://HOST:PORT`, which is encrypted. Both ask for the keys in the run's folder."""

    @property
    def host(self) -> str | None:
        return self.address.removeprefix("tcp://").rpartition(":")[0].strip("[]") if self.port else None

    @property
    def port(self) -> str | None:
        return self.address.rpartition(":")[2] if self.address.startswith("tcp://") else None

    path: Path | None = Path("buffer.sqlite")
    """SQLite file of the ledger, relative to the run's folder; null: in memory, lost with the process."""
    fsync: bool = True
    """Wait for the disk at each commit, to survive a power cut as well as a killed process."""
    keep: Literal["checkpoints", "all"] = "checkpoints"
    """Trained samples: remove those older than the oldest kept checkpoint, or keep all."""
    max_gib: Annotated[float, Field(gt=0)] = 8.0
    """Size of stored samples not yet trained; above it servers wait to put a group."""
    max_message_mib: Annotated[int, Field(ge=1, le=MOST_MESSAGE_MIB)] = 256
    """Largest message accepted."""


class ClusterConfig(Section):
    address: str | None = None
    """Ray cluster on which `python -m actors launch` places the processes, such as `10.0.0.1:6379`, or `auto` for this
    machine's; null: that of RAY_ADDRESS, else this machine without Ray. `local`: a Ray started on this machine, for
    accelerators that only Ray counts."""
    ship: Literal["auto", "always", "never"] = "auto"
    """Whether Ray copies the working directory to the nodes (at most 512 MiB, `.gitignore` is obeyed): `auto` if a node
    does not see it; with `never` nodes must have a folder of the same path."""
    env: list[str] = []
    """Further variables of the launcher's environment for processes on a cluster, by name or as `MY_*`. They always get
    `HF_* VLLM_* NCCL_* GLOO_* TORCH_* OMP_* WANDB_*`, PYTHONPATH and proxies; the rest is the node's."""
    interface: str | None = None
    """Network interface of gloo and NCCL on every node; null: the one with the node's address in Ray."""


class EvalConfig(Section):
    every: Positive | None = None
    """Versions between evaluations on `data.eval` while the run trains, version 0 and the last included; one server
    holds newer policies back until it has evaluated. null: none."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of its places that a server gives to an evaluation while it has groups to make; if no group is admitted,
    the evaluation takes all free places."""
    keep_samples: Annotated[int, Field(ge=0)] = 32
    """Answers of each set that the buffer keeps, of the first and the 20 newest evaluations."""


class LogConfig(Section):
    trackers: list[Literal["tensorboard", "wandb", "swanlab"]] = []
    """Trackers of the records in metrics.jsonl; one that fails costs a warning, never the run."""
    servers_every_s: Seconds = 15.0
    """Seconds between two lines of metrics.jsonl about servers and buffer."""
    price_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None
    """Price of a GPU hour in any currency, for the run's cost in `python -m actors watch` and the report; null: they
    show GPU hours only."""
    display: Literal["auto", "rich", "plain"] = "auto"
    """Display of `python -m actors launch`; `auto` is rich on a terminal, else plain lines."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    teacher: TeacherConfig = TeacherConfig()
    sampling: SamplingConfig = SamplingConfig()
    batch: BatchConfig = BatchConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    sft: SftConfig = SftConfig()
    learner: LearnerConfig = LearnerConfig()
    rollout: RolloutConfig = RolloutConfig()
    weights: WeightsConfig = WeightsConfig()
    buffer: BufferConfig = BufferConfig()
    cluster: ClusterConfig = ClusterConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    _origins: dict[tuple[int | str, ...], Any] = PrivateAttr(default_factory=dict)
    """Values that came from environment variables, by place."""

    @model_validator(mode="before")
    @classmethod
    def _no_reward(cls, given: Any) -> Any:
        """Supervised fine-tuning and a teacher need no `reward.function`. `load` names every section."""
        match given:
            case {"sft": {"rows": int()}, "reward": {**reward}} if "function" not in reward:
                return {**given, "reward": {**reward, "function": NO_REWARD}}
            case {"teacher": {**teacher}, "reward": {**reward}} if "function" not in reward:
                if any(teacher.get(key) for key in ("model", "url", "by_source")):
                    return {**given, "reward": {**reward, "function": NO_REWARD}}
        return given

    @model_validator(mode="before")
    @classmethod
    def _quantised_probe(cls, given: Any) -> Any:
        """The default of `weights.probe_tolerance` where one end multiplies in FP8. Fine-tuning sends no weights."""
        match given:
            case {"sft": {"rows": int()}}:
                return given
            case {"learner": {"matmul": "fp8"}, "weights": {"probe_tolerance": None, **rest}}:
                return {**given, "weights": {**rest, "probe_tolerance": QUANTISED_PROBE_TOLERANCE}}
            case {"rollout": {"engine": {"quantization": str()}}, "weights": {"probe_tolerance": None, **rest}}:
                return {**given, "weights": {**rest, "probe_tolerance": QUANTISED_PROBE_TOLERANCE}}
        return given
