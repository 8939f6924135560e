"""What a run file must satisfy about teachers, or without a reward. Whether a teacher has the policy's vocabulary takes
two tokenizers (`rollout/teachers/vocabulary.py`)."""

from collections.abc import Iterator

from configs.model_facts import facts_of, model_facts
from configs.schema import NO_REWARD, Config, TeacherConfig, TeacherModel
from configs.variables import is_http

SET_BY_US = {
    *("model", "runner", "host", "port", "middleware", "enable_lora", "max_logprobs"),
    *("logprobs_mode", "served_model_name", "skip_tokenizer_init", "worker_extension_cls"),
}
"""With some `logprobs_mode` vLLM returns logits in place of log-probabilities."""
WHOLE_SAMPLE_LOSSES = ("gspo", "topr")
"""These take the advantage of each token of a sample as one."""
SET_REWARD = "set reward.function"


def rules(config: Config, longest: int) -> Iterator[str]:
    """Yield what is wrong. `longest`: tokens of the longest sample."""
    if config.reward.function == NO_REWARD:
        yield from _without_reward(config)
    teacher = config.teacher
    if not teacher.teachers:
        yield from _without_teacher(teacher)
        return
    yield from _sources(teacher)
    for source, each in teacher.teachers.items():
        yield from _one(key_of(teacher, source), each, longest)
    yield from _ports(config)
    yield from _policy(config)
    yield from _algorithm(config)
    yield from _top_k(config)


def key_of(teacher: TeacherConfig, source: str) -> str:
    """The key below which the teacher of `data_source` stands."""
    for number, each in enumerate(teacher.by_source):
        if each.data_source == source:
            return f"teacher.by_source.{number}"
    return "teacher"


def tokenizer_of(teacher: TeacherModel) -> str | None:
    return teacher.tokenizer or teacher.model


def _without_reward(config: Config) -> Iterator[str]:
    none = f"reward.function is {NO_REWARD}, so all rewards are 0"
    if not config.teacher.teachers:
        yield f"reward.function: {NO_REWARD} leaves nothing to learn from; name a reward, or a teacher in teacher.model"
    if config.eval.every is not None:
        yield f"eval.every: {config.eval.every}, but {none}, in evaluations too; {SET_REWARD}, or eval.every: null"
    if config.data.difficulty is not None:
        yield f"data.difficulty: it follows rewards, but {none}; {SET_REWARD}, or data.difficulty: null"
    if config.learner.keep_best:
        yield f"learner.keep_best: {config.learner.keep_best} follows rewards, but {none}; set it to 0"
    if config.algorithm.overlong == "soft":
        yield f"algorithm.overlong: soft lowers rewards, but {none}; set it to keep or mask"


def _without_teacher(teacher: TeacherConfig) -> Iterator[str]:
    for key in teacher.model_dump(exclude_defaults=True):
        yield f"teacher.{key}: there is no teacher that it is for; set teacher.model or teacher.url, or remove the key"


def _sources(teacher: TeacherConfig) -> Iterator[str]:
    sources = [each.data_source for each in teacher.by_source]
    for source in sorted({source for source in sources if sources.count(source) > 1}):
        yield f"teacher.by_source: {sources.count(source)} teachers have data_source {source}; leave one of them"
    if not teacher.named:
        for key in ("tokenizer", "servers", "weight", "api_key_env", "engine"):
            if key in teacher.model_dump(exclude_defaults=True):
                yield f"teacher.{key}: teacher has no model or url; write it into the entries of teacher.by_source"


def _one(key: str, teacher: TeacherModel, longest: int) -> Iterator[str]:
    if not teacher.named:
        yield f"{key}: it has neither model nor url; set one of them"
    elif teacher.url is None and not teacher.servers:
        yield f"{key}.model: {teacher.model} is served by nobody; set {key}.servers: 1, or the {key}.url of a server"
    if teacher.url is not None and teacher.servers:
        yield f"{key}.servers: {teacher.servers}, but {key}.url names servers; remove one of the two"
    if teacher.url is not None and tokenizer_of(teacher) is None:
        yield f"{key}.tokenizer: null, so nothing shows the vocabulary behind {key}.url; name the teacher's tokenizer"
    urls = [teacher.url] if isinstance(teacher.url, str) else teacher.url or []
    for url in urls:
        if not is_http(url) or url.rstrip("/").endswith("/v1"):
            yield f"{key}.url: {url}: write it as http://HOST:PORT, without /v1"
    if teacher.url is None and teacher.api_key_env:
        yield f"{key}.api_key_env: the run's own servers ask for the token of the run; remove the key"
    facts = model_facts(teacher.model or "") if teacher.servers else None
    yield from (f"{key}.model: {teacher.model} ({facts.kind}): {line}" for line in facts.unserved) if facts else ()
    yield from (f"{key}.engine.{name}: Headrace sets it; remove the key" for name in SET_BY_US & teacher.engine.keys())
    yield from _length(key, teacher, longest)


def _length(key: str, teacher: TeacherModel, longest: int) -> Iterator[str]:
    """vLLM samples one token after the text that it scores."""
    held, need = teacher.engine.get("max_model_len"), longest + 1
    why = f"samples of up to {longest} tokens and one more, which vLLM generates"
    if isinstance(held, int) and held < need:
        yield f"{key}.engine.max_model_len: {held} is less than {why}; set it to {need} or more"
    facts = model_facts(teacher.model or "")
    if facts.positions is not None and facts.positions < need:
        yield f"{key}.model: {teacher.model} has {facts.positions} positions, less than {why}; shorten samples"


def _ports(config: Config) -> Iterator[str]:
    teacher, number = config.teacher, len(config.teacher.served)
    last = teacher.port + number - 1
    if number and last > 65535:
        yield f"teacher.port: the last of {number} teacher servers would listen on {last}; lower it"
    ports = {"the buffer's": config.buffer.port or ""}
    ports |= {f"that of reward-{n}": str(config.reward.port + n) for n in range(config.reward.servers)}
    for whose, port in ports.items() if number else ():
        if port.isdigit() and teacher.port <= int(port) <= last:
            yield f"teacher.port: {teacher.port} to {last} for the teacher servers include {whose}; choose others"
            return


def _policy(config: Config) -> Iterator[str]:
    if facts_of(config.model).image_token is not None:
        problem = f"teacher: {config.model.path} reads images, and a teacher gets tokens only"
        yield f"{problem}; remove the section teacher, or set model.text_alone: true"
    if config.sampling.temperature != 1:
        problem = f"sampling.temperature: {config.sampling.temperature:g}, but a teacher's log-probabilities are of 1"
        yield f"{problem}; set it to 1, or remove the section teacher"


def _top_k(config: Config) -> Iterator[str]:
    top_k, loss, known = config.teacher.top_k, config.algorithm.loss, facts_of(config.model).vocabulary
    if top_k is None:
        return
    if ":" in loss:
        yield f"teacher.top_k: {top_k} with algorithm.loss: {loss}: nobody has trained both; set it to null"
    if known and top_k > known:
        yield f"teacher.top_k: {top_k}, but {config.model.path} has {known} tokens; set it to {known} or less"


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, own = config.algorithm, "a teacher gives each token an advantage of its own"
    if algorithm.loss in WHOLE_SAMPLE_LOSSES:
        yield f"algorithm.loss: {algorithm.loss} weights whole samples, and {own}; set another loss"
    if algorithm.opsm_delta is not None:
        yield f"algorithm.opsm_delta: {algorithm.opsm_delta:g} masks whole samples, and {own}; set it to null"
    if config.batch.skip_zero_variance:
        yield "batch.skip_zero_variance: true leaves out groups that a teacher can teach; set it to false"
    if algorithm.advantage == "gae":
        yield "algorithm.advantage: gae with a teacher: nobody has trained both; take another advantage or no teacher"
    if config.learner.context_parallel > 1:
        ranks = f"learner.context_parallel: {config.learner.context_parallel}"
        yield f"{ranks} with a teacher: nobody has trained both; set it to 1 or take no teacher"
