"""Every key of the run file in words, and the key that a misspelt one was meant to be."""

import ast
import difflib
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from configs import schema as sections_of_config
from configs.schema import Config

NAME = "NAME"

EXAMPLES = {
    "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "data.train": "data/countdown/train.parquet",
    f"data.train.{NAME}.path": "data/countdown/train.parquet",
    "data.demonstrations.path": "data/shown.jsonl",
    f"data.demonstrations.path.{NAME}.path": "data/shown.jsonl",
    f"data.eval.{NAME}.path": "data/countdown/eval.parquet",
    "reward.function": "countdown",
    f"reward.function.{NAME}.function": "countdown",
    f"teacher.by_source.{NAME}.data_source": "openai/gsm8k",
    "rollout.servers.max": "8",
}

RENAMED_KEYS = {"weights.deadline_s": "weights.timeout_s", "rollout.groups_in_flight": "rollout.sequences"}
"""Old keys, accepted with a warning."""

FACTORS = {"rollout.groups_in_flight": "batch.samples"}
"""These values are multiplied by those of other keys."""

ELSEWHERE = {
    "eval_files": "data.eval",
    "experiment_name": "run.name",
    "gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "group_size": "batch.samples",
    "kl_coef": "algorithm.reference_kl",
    "learning_rate": "learner.lr",
    "max_model_len": "rollout.engine.max_model_len",
    "max_new_tokens": "sampling.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_steps": "run.versions",
    "n": "batch.samples",
    "ppo_max_token_len_per_gpu": "learner.tokens_per_microbatch",
    "rollout_n": "batch.samples",
    "staleness": "batch.max_staleness",
    "steps": "run.versions",
    "tensor_model_parallel_size": "rollout.tensor_parallel",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "total_epochs": "data.epochs",
    "total_training_steps": "run.versions",
    "train_batch_size": "batch.groups",
    "train_files": "data.train",
    "val_files": "data.eval",
}
"""Names in other systems."""

VALUES_ELSEWHERE = {
    "algorithm.loss": {
        "grpo": "GRPO is algorithm.loss: ppo with algorithm.advantage: group_std and algorithm.aggregation: sequence",
        "dr_grpo": "Dr. GRPO is algorithm.loss: ppo with advantage: group_mean and aggregation: constant",
        "dapo": "DAPO is algorithm.loss: ppo with clip_high 0.28, aggregation: token, overlong: soft and"
        " batch.skip_zero_variance: true",
        "vanilla": "verl's vanilla is algorithm.loss: ppo with dual_clip: 3",
        "rloo": "RLOO is algorithm.loss: reinforce or ppo with algorithm.advantage: leave_one_out",
        "reinforce++": "REINFORCE++ is algorithm.loss: ppo with algorithm.advantage: reinforce_baseline",
    },
    "algorithm.advantage": {
        "grpo": "GRPO's is group_std, with algorithm.loss: ppo",
        "dr_grpo": "Dr. GRPO's is group_mean",
        "rloo": "RLOO's is leave_one_out",
        "ppo": "PPO's is gae, with algorithm.loss: ppo",
    },
    "algorithm.aggregation": {
        "token-mean": "verl's token-mean is token",
        "seq-mean-token-mean": "verl's seq-mean-token-mean is sequence",
        "seq-mean-token-sum": "verl's seq-mean-token-sum is constant with algorithm.constant_length: 1",
    },
}
"""Values in other systems."""

BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
TYPES = {"boolean": "true or false", "null": "null", "object": "a map"}


class Key(NamedTuple):
    """Example: `Key("batch.groups", "a whole number >= 1", "32", False, "Groups in a batch.")`"""

    name: str
    type: str
    default: str
    required: bool
    meaning: str


def _docstring(section: str, field: str) -> str:
    classes = getattr(sections_of_config, section).__mro__
    return next(texts[field] for each in classes if field in (texts := _docstrings().get(each.__name__, {})))


@cache
def _docstrings() -> dict[str, dict[str, str]]:
    """Docstrings of fields by class, from the source. Pydantic would extract them in each process that imports the
    schema, in 0.04 s."""
    classes = (node for node in ast.parse(inspect.getsource(sections_of_config)).body if isinstance(node, ast.ClassDef))
    found: dict[str, dict[str, str]] = {}
    for section in classes:
        for field, text in pairwise(section.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found.setdefault(section.name, {})[name] = words
    return found


@cache
def keys() -> dict[str, Key]:
    schema = Config.model_json_schema()
    table: dict[str, Key] = {}
    forms = schema["$defs"]

    def add(prefix: str, place: dict[str, Any]) -> None:
        section = place["$ref"].rpartition("/")[2]
        model = schema["$defs"][section]
        for name, field in model["properties"].items():
            dotted, required = f"{prefix}.{name}", name in model.get("required", ())
            if "$ref" in field:
                add(dotted, field)
                continue
            meaning = " ".join(_docstring(section, name).split())
            table[dotted] = Key(dotted, _type(field, forms), show(field.get("default")), required, meaning)
            forms_of_value = field.get("anyOf", ())
            for entry in _entries(field):
                add(dotted if entry in forms_of_value else f"{dotted}.{NAME}", entry)

    for section, place in schema["properties"].items():
        add(section, place)
    return table


def _entries(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in field:
        yield field
    inner = [*field.get("anyOf", ()), *field.get("patternProperties", {}).values()]
    inner += [each for word in ("items", "additionalProperties") if isinstance(each := field.get(word), dict)]
    for each in inner:
        yield from _entries(each)


def key_of(place: Sequence[int | str]) -> str:
    """The key that holds `place`: `["data", "eval", "aime", "k", 0]` -> `data.eval.NAME.k`"""
    parts = [str(part) for part in place]
    for end in range(len(parts), 1, -1):
        for each in (parts[:end], [*parts[:2], NAME, *parts[3:end]]):
            if (name := ".".join(each)) in keys():
                return name
    return ".".join(parts[:2])


def sections() -> tuple[str, ...]:
    return tuple(Config.model_fields)


def show(value: Any) -> str:
    """`value` as YAML on one line, cut when long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def suggest(wrong: str) -> str:
    """The remedy, such as `did you mean learner.lr?`"""
    above, _, leaf = wrong.rpartition(".")
    section = f"{above.rpartition('.')[0]}.{NAME}" if above.count(".") == 2 else above
    names = list(keys())
    here = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]
    if near := difflib.get_close_matches(leaf, here, 1, 0.6):
        return f"did you mean {above}.{near[0]}?"
    if leaf in ELSEWHERE:  # also where an unnamed section has such a key
        return f"did you mean {ELSEWHERE[leaf]}?"
    if same := [name for name in names if name.endswith(f".{leaf}") and NAME not in name]:
        return f"did you mean {' or '.join(difflib.get_close_matches(wrong, same, 1, 0.85) or same)}?"
    if near := difflib.get_close_matches(wrong, names, 1, 0.75):
        return f"did you mean {near[0]}?"
    leaves = {name.rpartition(".")[2]: name for name in names} | ELSEWHERE
    # difflib scores keys of two letters low: `lrr` for `lr`
    short = [name for name in leaves if len(name) == 2 and leaf.startswith(name) and len(leaf) == 3]
    if near := difflib.get_close_matches(leaf, leaves, 1, 0.7) or short:
        return f"did you mean {leaves[near[0]]}?"
    return f"{above} has {', '.join(here)}" if here else f"the sections are {', '.join(sections())}"


def overview(width: int) -> str:
    """Names of keys by section, for `--help`."""
    lines = []
    for section, its_keys in groupby(keys().values(), lambda key: key.name.partition(".")[0]):
        own = ", ".join(_without_groups(key.name.partition(".")[2] for key in its_keys))
        lines += textwrap.wrap(own, width, initial_indent=f"  {section:<10} ", subsequent_indent=" " * 13)
    return "\n".join(lines)


def _without_groups(names: Iterable[str]) -> Iterator[str]:
    """`lora.rank`, `.alpha`"""
    before = ""
    for name in names:
        group, _, leaf = name.rpartition(".")
        yield f".{leaf}" if group and group == before else name
        before = group


def text(width: int, only: str = "") -> str:
    """What `--keys` prints. Raises ValueError for an unknown section."""
    if only and only not in sections():
        raise ValueError(f"{only}: no section of the run file; the sections are {', '.join(sections())}")
    lines = []
    for section, its_keys in groupby(keys().values(), lambda key: key.name.partition(".")[0]):
        if only not in ("", section):
            continue
        lines += ["", f"{section}:"]
        for key in its_keys:
            default = "required" if key.required else f"default {key.default}"
            lines += _wrap(f"--{key.name}  {key.type}; {default}", width, "  ")
            lines += _wrap(key.meaning, width, "      ")
    return "\n".join(lines)


def _wrap(words: str, width: int, indent: str) -> list[str]:
    """No word is broken, so that a search finds every key."""
    return textwrap.TextWrapper(width, indent, "      ", break_long_words=False, break_on_hyphens=False).wrap(words)


def _type(schema: dict[str, Any], forms: dict[str, Any]) -> str:
    """Such as `a whole number >= 1 or null`."""
    if "$ref" in schema:
        return f"a map of {', '.join(forms[schema['$ref'].rpartition('/')[2]]['properties'])}"
    if "anyOf" in schema:
        return " or ".join(_type(one, forms) for one in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "patternProperties" in schema:
        return "a path, or a map with a name for each set"
    kind = schema.get("type", "object")
    if kind in ("integer", "number"):
        bounds = [f"{sign} {schema[bound]}" for bound, sign in BOUNDS.items() if bound in schema]
        return " ".join(["a whole number" if kind == "integer" else "a number", " and ".join(bounds)]).strip()
    if kind == "string" and "examples" in schema:
        return f"text like {schema['examples'][0]}"
    if kind == "string" and "pattern" in schema:
        return f"text matching {schema['pattern']}"
    if kind == "string":
        return "a path" if schema.get("format") == "path" else "text"
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}, each {_type(schema['prefixItems'][0], forms)}"
    if kind == "array":
        return f"a list, each {_type(schema['items'], forms)}"
    inner = schema.get("additionalProperties")
    return f"{TYPES[kind]} of {_type(inner, forms)}" if isinstance(inner, dict) else TYPES[kind]
