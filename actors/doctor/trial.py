"""Tries what only running it can judge: prompts, reward and task of a run, each in a process of its own.

Users' code runs here: it may print, hang, end its process or start others, which end with it.
"""

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgpack

from buffer.data.image_rows import IMAGES, MARK, num_slots
from configs.architecture import is_proven
from configs.data.sources import source_name
from configs.hub_reach import is_skipped
from configs.inner_command import inner_words
from configs.load import ConfigError, dump, parse
from configs.own_packages import command
from configs.parent_death import adopt_orphans, end_with_parent
from configs.schema import NO_REWARD, Config, RewardPart
from configs.writing import writing
from rollout.cage.warden import kill_all

if TYPE_CHECKING:
    from rollout.episodes.prompts import Prompts
    from rollout.rewards.convention import Reward

Rows = Sequence[tuple[int, dict[str, Any]]]
"""Rows of data.train with their numbers."""
IMPORT_S = 7.0
TOKENIZER_S = 6.0
TEACHER_S = 120.0
TOKEN = re.compile(r"[<>|/\w-]+")
"""Tokens in which only `|` has a meaning in a pattern."""
ROWS_S = 3.0
START_S = 180.0
"""For a machine on which Python itself starts slowly."""
END_S = 10.0


@dataclass
class Judgement:
    """Findings about a run file, one line each."""

    refused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    rows: int | None = None

    def add(self, other: "Judgement") -> None:
        self.refused += [line for line in other.refused if line not in self.refused]
        self.warnings += other.warnings
        self.facts += other.facts

    def lines(self) -> list[str]:
        return [*self.facts, *(f"warning: {line}" for line in self.warnings)]


def try_out(parts: Iterable[str], config: Config, rows: Rows, number: int | None = None) -> Judgement:
    """Try `parts` at the same time, each in its own process. Raises TypeError for rows that cannot be sent."""
    given = msgpack.packb({"config": dump(config), "rows": rows, "number": number})
    together = Judgement()
    with ExitStack() as running:
        split = [
            [f"reward {n}" for n in range(len(config.reward.parts))] if part == "reward" else [part] for part in parts
        ]
        for trial in [running.enter_context(started(part, given)) for each in split for part in each]:
            together.add(trial(START_S + 2 * import_s(config)))
    return together


def import_s(config: Config) -> float:
    """Time limit of the import of a user's file."""
    return max(IMPORT_S, 0.7 * config.reward.timeout_s)


@contextmanager
def started(part: str, given: bytes) -> Iterator[Callable[[float], Judgement]]:
    """Start the process that tries `part`; yields a function that waits for its judgement."""
    with tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True) as folder:
        with writing(Path(folder)):
            (Path(folder) / "given").write_bytes(given)
        line = command("actors.doctor.trial", part, folder)
        none = subprocess.DEVNULL
        process = subprocess.Popen(line, stdin=none, stdout=none, stderr=none, start_new_session=True)

        def judgement(timeout_s: float) -> Judgement:
            try:
                how = f"ended with exit code {process.wait(timeout_s)}"
            except subprocess.TimeoutExpired:
                how = f"gave no answer for {timeout_s:g} s"
            file = Path(folder) / "judgement"
            if file.exists():
                return Judgement(**json.loads(file.read_text()))
            remedy = "see what it does when it is imported"
            return Judgement([f"{PARTS[part.partition(' ')[0]][0]}: the process that tried it {how}; {remedy}"])

        try:
            yield judgement
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Trial:
    """Findings so far, and time limits that hold whatever users' code does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, Judgement()

    def save(self, further: Sequence[str] = ()) -> None:
        """Leave the judgement, in case the process ends unexpectedly."""
        draft = self.folder / "draft"
        found = Judgement(self.found.refused, [*self.found.warnings, *further], self.found.facts)
        draft.write_text(json.dumps(asdict(found)))
        draft.replace(self.folder / "judgement")

    def end(self) -> NoReturn:
        self.save()
        os._exit(0)

    @contextmanager
    def limit(self, seconds: float, lines: list[str], line: str) -> Iterator[None]:
        def give_up() -> None:
            lines.append(line)
            self.end()

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def importing(self, key: str, name: str, seconds: float) -> Iterator[None]:
        """Whatever the import in the body raises is reported and ends the process."""
        file = name.rpartition(":")[0] or name
        late = f"{key}: the import of {file} has not ended after {seconds:g} s, it is not judged; workers wait longer"
        try:
            with self.limit(seconds, self.found.warnings, late):
                yield
            return
        except ConfigError as error:
            self.found.refused += error.problems
        except ValueError as error:
            self.found.refused.append(one_line(error))
        except BaseException as error:  # SystemExit and KeyboardInterrupt too
            remedy = "a file that is imported must neither raise nor exit"
            self.found.refused.append(f"{key}: {file} cannot be imported: {named(error)}; {remedy}")
        self.end()


def fork_guarded() -> None:
    """Return in a new process. This one waits for its end or for SIGTERM, and ends all that it has started."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    guard, child = os.getpid(), os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent()
        if os.getppid() == guard:
            return
        os._exit(1)
    code = 1
    try:
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        code = ended.si_status if ended else 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_all(child)
        os._exit(code)


def main(argv: Sequence[str]) -> NoReturn:
    """Try one part, such as `reward 1`, the second reward function."""
    (part, _, which), folder = argv[0].partition(" "), argv[1]
    given = msgpack.unpackb((Path(folder) / "given").read_bytes())
    trial = Trial(Path(folder))
    trial.found.rows = given["number"]
    key, attempt = PARTS[part]
    try:
        attempt(trial, parse(given["config"]), given["rows"], int(which or 0))
    except Exception as error:
        trial.found.warnings.append(f"{key}: not judged: {named(error)}")
    trial.end()


def prompts(trial: Trial, config: Config, rows: Rows, _: int) -> None:
    """Load the tokenizer, and make prompts of rows until ROWS_S are over."""
    if is_skipped(config.model.path):
        why = "is not on this machine, and the hub cannot be reached"
        trial.found.warnings.append(f"model.path: {config.model.path} {why}: prompts and layers are not judged")
        return
    if not config.model.trust_remote_code:
        sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers do not need it, and it is 5 s of imports
    import transformers

    from buffer.data.images import ImageFormat
    from rollout.episodes.prompts import Prompts, load_tokenizer
    from rollout.errors import PromptError

    transformers.utils.logging.set_verbosity_error()
    late = f"model.path: the tokenizer of {config.model.path} did not load in {TOKENIZER_S:g} s, prompts are not judged"
    try:
        with trial.limit(TOKENIZER_S, trial.found.warnings, late):
            form = ImageFormat.of_run(config)
            made = Prompts(load_tokenizer(config), config, form)
    except ConfigError as error:
        trial.found.refused += error.problems
        return
    except ValueError as error:
        trial.found.refused.append(one_line(error))
        return
    lengths: dict[int, int] = {}
    failed: dict[int, str] = {}
    shown: set[bool] = set()
    first = ""
    end = time.monotonic() + ROWS_S
    for number, row in rows:
        try:
            row, pictures = made.with_pictures(row) if row.get(IMAGES) else (row, [])
            tokens = made.encode(row, pictures)
        except PromptError as error:
            failed[number] = one_line(error)
        else:
            if bool(pictures) not in shown:
                shown.add(bool(pictures))
                text = made.shown(tokens)
                first = first or text
                line = f"prompts: the prompt of row {number} has {len(tokens)} tokens: {both_ends(repr(text))}"
                trial.found.facts.append(line)
            lengths[number] = len(tokens)
        if time.monotonic() > end:
            break
    if failed:
        judge_failures(trial.found, config, failed, len(lengths))
    if lengths:
        judge_lengths(trial.found, config, lengths)
    judge_ends(trial.found, config, made)
    judge_template(trial.found, config, made, first)
    judge_tools(trial.found, config, rows)
    if form:
        judge_marks(trial.found, config, rows)


def judge_marks(found: Judgement, config: Config, rows: Rows) -> None:
    """Warn of marks of images in rows without images, which a model that sees reads as text."""
    texts = ((number, row.get("prompt") or row.get("problem")) for number, row in rows if not row.get(IMAGES))
    marked = [number for number, text in texts if num_slots(text)]
    if marked and config.rollout.task == "single_turn":
        share = f"{len(marked):,} of {len(rows):,} rows looked at have {MARK} and no images, such as row {marked[0]}"
        remedy = f"the model reads {MARK} as text; name their images in the column {IMAGES}"
        found.warnings.append(f"data.train: {source_name(config.data.train)}: {share}: {remedy}")


def judge_tools(found: Judgement, config: Config, rows: Rows) -> None:
    """Warn of tools that the model does not see."""
    having = [number for number, row in rows if row.get("tools")]
    if having and config.rollout.task == "single_turn":
        share = f"{len(having):,} of {len(rows):,} rows looked at have tools, such as row {having[0]}"
        remedy = "the model does not see them; write them into the system message, or name a rollout.task that has them"
        found.warnings.append(f"data.train: {source_name(config.data.train)}: {share}: {remedy}")


def judge_template(found: Judgement, config: Config, made: "Prompts", first: str) -> None:
    """Warn of unknown template arguments, and of a tag that ends prompts, which rewards do not see."""
    for name in config.rollout.chat.template_kwargs:
        if made.plain or name not in made.template_text:
            found.warnings.append(f"rollout.chat.template_kwargs.{name}: the chat template has no such argument")
    judge_parsers(found, config, made)
    judge_special_tokens(found, config, made)
    opened = re.search(r"<(\w+)>\s*$", first)
    if opened is None:
        return
    tag = f"<{opened[1]}>"
    found.facts.append(f"note: prompts end with {tag}: the answer begins after it, and rewards do not see it")
    for part in config.reward.parts:
        pattern = pattern_of(part)
        if part.function == "countdown" and tag == "<answer>":
            never = f"countdown needs {tag} in an answer, but prompts already end with it"
            found.warnings.append(f"reward.function: {never}; leave it out there")
        if tag in pattern and not re.search(rf"\((\?:)?{tag}\)\?", pattern):
            never = f"needs {tag} in an answer, but prompts already end with it"
            found.warnings.append(f"reward.function: the pattern of {part.metric} {never}; write ({tag})? there")


def pattern_of(part: RewardPart) -> str:
    """The pattern of a built-in reward, or ""."""
    return str(part.kwargs.get("pattern", "")) if part.function in ("regex", "exact_match") else ""


def judge_special_tokens(found: Judgement, config: Config, made: "Prompts") -> None:
    """Warn of patterns that need a special token: built-in rewards read answers without them."""
    special = {str(token) for token in made.tokenizer.added_tokens_decoder.values() if token.special}
    for part in config.reward.parts:
        pattern = pattern_of(part)
        for token in sorted(special):
            written = {re.escape(token)} | ({token.replace("|", r"\|")} if TOKEN.fullmatch(token) else set())
            if any(re.search(rf"(?<!\|){re.escape(text)}(?!\||\)[?*])", pattern) for text in written):
                never = f"needs {token}, but rewards read answers without special tokens; remove it there"
                found.warnings.append(f"reward.function: the pattern of {part.metric} {never}")


def judge_parsers(found: Judgement, config: Config, made: "Prompts") -> None:
    """Name what `rollout.chat` switches and chooses for this model."""
    from rollout.episodes.parser_choice import settled_chat

    given = config.rollout.chat
    if given.thinking != "auto":
        switch = made.template_kwargs.keys() - given.template_kwargs.keys()
        shown = ", ".join(f"{name}: {json.dumps(made.template_kwargs[name])}" for name in switch)
        found.facts.append(
            f"rollout.chat.thinking: {'on' if given.thinking else 'off'}: the chat template gets {shown}"
        )
    try:
        chat = settled_chat(config, made)
    except ValueError as error:
        found.refused.append(str(error))
        return
    for key, what in (("tool_parser", "tool calls"), ("reasoning_parser", "thinking")):
        if getattr(given, key) == "auto":
            name = getattr(chat, key)
            how = f"vLLM's parser {name} reads the {what}" if name else f"the chat template writes no {what}"
            found.facts.append(f"rollout.chat.{key}: auto: {how}")


def architecture(trial: Trial, config: Config, rows: Rows, _: int) -> None:
    """Let the learner compute a small copy of a model whose type the tests do not cover."""
    from buffer.data.images import read_model_file

    if is_skipped(config.model.path):  # `prompts` says so
        return
    if is_proven(read_model_file(config.model.path, "config.json") or {}):
        return
    from learner.model.exactness import check_in_own_process  # imports torch

    try:
        check_in_own_process(config.model, bool(config.learner.share_prompts), config.learner.context_parallel)
    except ConfigError as error:
        trial.found.refused += error.problems
    else:
        line = f"model.path: {config.model.path}: a small copy was tried; its packed rows are computed exactly"
        trial.found.facts.append(line)


def algorithm(trial: Trial, config: Config, rows: Rows, _: int) -> None:
    """Let the learner try a loss and an advantage of the user on a tiny batch."""
    from learner.algorithms.own_trial import check_alone, check_own  # imports torch

    chosen = config.algorithm
    key, name = ("algorithm.loss", chosen.loss) if ":" in chosen.loss else ("algorithm.advantage", chosen.advantage)
    with trial.importing(key, name, import_s(config)):
        tried = list(check_own(chosen, config.sampling.max_tokens, config.rollout.task != "single_turn"))
        check_alone(chosen)
    trial.found.facts += tried


def judge_failures(found: Judgement, config: Config, failed: dict[int, str], others: int) -> None:
    """Rows that cannot be made a prompt: refused if all of them."""
    example = next(f"row {number}: {reason}" for number, reason in failed.items())
    if others:
        share = f"{len(failed):,} of {len(failed) + others:,} rows looked at make no prompt and are dropped"
        found.warnings.append(f"data.train: {source_name(config.data.train)}: {share}, such as {example}")
    else:
        keys = "its columns and images, data.chat_template and data.format_prompt"
        found.refused.append(
            f"data.train: {source_name(config.data.train)}: no row can be made into a prompt, {example}; correct {keys}"
        )


def judge_lengths(found: Judgement, config: Config, lengths: dict[int, int]) -> None:
    """Prompts that are too long: refused if all of them."""
    limit, longest = config.data.max_prompt_tokens, max(lengths.values())
    long = sum(length > limit for length in lengths.values())
    key = f"data.max_prompt_tokens: {limit}"
    remedy = f"the longest has {longest:,} tokens; raise it, or leave such rows out"
    if long == len(lengths):
        shortest = f"the prompts of all {long:,} rows looked at are longer, the shortest has {min(lengths.values()):,}"
        found.refused.append(f"{key}: {shortest}, {remedy}")
    elif long:
        share = f"{long:,} of {len(lengths):,} rows looked at ({long / len(lengths):.1%}) have longer prompts"
        if found.rows and found.rows > len(lengths):
            share += f", as about {long / len(lengths) * found.rows:,.0f} of all {found.rows:,} have,"
        found.warnings.append(f"{key}: {share} and are dropped, {remedy}")


def judge_ends(found: Judgement, config: Config, made: "Prompts") -> None:
    most = f"sampling.max_tokens {config.sampling.max_tokens}"
    sources = dict.fromkeys(made.stops, "sampling.stop") | made.end_sources
    names = made.tokenizer.convert_ids_to_tokens(list(sources))
    ends = ", ".join(f"{name} ({source})" for name, source in zip(names, sources.values(), strict=True))
    if not ends:
        found.warnings.append(f"sampling.stop: []: nothing ends an answer but {most}; name a token of the tokenizer")
    elif made.plain and not config.sampling.stop:
        where = f"data.chat_template: none: answers end at {ends} or after {most} only"
        found.facts.append(f"note: {where}; a base model may go on for ever: name its end in sampling.stop")
    else:
        found.facts.append(f"answers end at {ends} or after {most}")


def reward(trial: Trial, config: Config, rows: Rows, number: int) -> None:
    """Import the reward function with this number and call it with an empty answer to three rows."""
    from rollout.episodes.prompts import without_images
    from rollout.rewards import load_reward

    plain, part = [(row, without_images(values)) for row, values in rows], config.reward.parts[number]
    with trial.importing("reward.function", part.function, import_s(config)):
        function = load_reward(config.reward, number)
    if not try_question(trial, function, plain[:3]) or part.uses_servers:  # the servers do not run yet
        return
    usable = judge_truths(trial.found, config, function, plain)
    if usable or not plain:
        try_reward(trial, config, function, usable[:3])


def judge_truths(found: Judgement, config: Config, function: "Reward", rows: Rows) -> Rows:
    """Return the rows whose ground truth a built-in reward can use; refuses if there are none."""
    from buffer.data.entry_maker import EntryError
    from rollout.errors import TruthError
    from rollout.rewards import REWARDS
    from rollout.rewards.convention import Answer
    from rollout.rewards.models.http_model import HttpModel

    made: object = function.function
    if function.name not in REWARDS or isinstance(made, HttpModel):
        return rows
    unusable: dict[int, str] = {}
    end, looked_at = time.monotonic() + ROWS_S, 0
    for number, row in rows:
        try:
            function.score([Answer(text="", num_tokens=0, row=row)])
        except TruthError as error:
            unusable[number] = one_line(error)
        except EntryError:  # `try_reward` reports it
            break
        looked_at += 1
        if time.monotonic() > end:
            break
    where, name = f"data.train: {source_name(config.data.train)}", function.name
    for number, why in list(unusable.items())[:1]:
        if len(unusable) < looked_at:
            share = f"{len(unusable):,} of {looked_at:,} rows looked at have no ground truth that {name} can use"
            found.warnings.append(f"{where}: {share} and are dropped, such as row {number}: {why}")
        else:
            none = f"no row has a ground truth that {name} can use, row {number}: {why}"
            found.refused.append(f"{where}: {none}; correct it, or name another column in data.columns")
    return [(number, row) for number, row in rows if number not in unusable]


def try_question(trial: Trial, function: "Reward", rows: Rows) -> bool:
    """Whether some of `rows` make a question for a reward on a model's server; asks nothing."""
    from rollout.errors import RewardError
    from rollout.rewards.convention import Answer
    from rollout.rewards.models.http_model import HttpModel

    made: Any = function.function
    if not isinstance(made, HttpModel):
        return True
    failed: dict[int, str] = {}
    for number, row in rows:
        for arguments in function.calls([Answer(text="an answer", num_tokens=2, row=row)]):
            try:
                made.question(**arguments)  # type: ignore[attr-defined]  # both kinds have it
            except Exception as error:  # a template may do anything
                failed[number] = one_line(error) if isinstance(error, RewardError) else named(error)
    for number, why in list(failed.items())[:1]:
        key = f"{function.key}.kwargs.{'template' if getattr(made, 'template', None) else 'model'}"
        line = f"{key}: {function.name} cannot be asked about {len(failed)} of {len(rows)} rows, row {number}: {why}"
        (trial.found.refused if len(failed) == len(rows) else trial.found.warnings).append(line)
    return len(failed) < len(rows) or not rows


def try_reward(trial: Trial, config: Config, function: "Reward", rows: Rows) -> None:
    """Ask for rewards of empty answers; nothing that happens here refuses the run."""
    from rollout.rewards.convention import Answer
    from rollout.rewards.models.http_model import HttpModel

    name = function.name
    asked = f"reward.function: {name}, asked for the reward of an empty answer,"
    trial.save([f"{asked} ends its process"])
    scores: list[float] = []
    raised: dict[int, str] = {}
    late = f"{asked} gave none within {import_s(config):g} s"
    made: object = function.function
    if isinstance(made, HttpModel):
        made.wait_elsewhere()  # a server that is not there is reported at once
    with trial.limit(import_s(config), trial.found.warnings, late), asyncio.Runner() as runner:
        for number, row in rows:
            answer = [Answer(text="", num_tokens=0, row=row)]
            try:
                found = runner.run(function.score_async(answer)) if function.is_async else function.score(answer)
                scores += [score.reward for score in found]
            except BaseException as error:  # users' code may raise anything
                raised[number] = named(error)
        if isinstance(made, HttpModel):
            runner.run(made.close())
    for number in list(raised)[:1]:
        fails = f"fails on {len(raised)} of {len(rows)} rows, row {number}: {raised[number]}"
        trial.found.warnings.append(f"{asked} {fails}")
    if scores:
        given = ", ".join(f"{score:g}" for score in scores)
        trial.found.facts.append(f"reward: {name} gives {given} for empty answers to {len(scores)} rows")


def task(trial: Trial, config: Config, rows: Rows, _: int) -> None:
    """Import the task and look at its signature: calling it takes an engine."""
    from configs.user_file import is_async
    from rollout.tasks import load_task
    from rollout.tasks.environment import start_host

    name = config.rollout.task
    if name == "environment":
        environment = config.rollout.environment.model_dump(mode="json")
        with trial.importing("rollout.environment.id", environment["id"], START_S):
            start_host(environment).kill()
        return
    with trial.importing("rollout.task", name, import_s(config)):
        function = load_task(name)
    if "base_url" not in inspect.signature(function).parameters and not is_async(function):
        trial.found.warnings.append(f"rollout.task: {name} is no `async def`; it must return an awaitable")


def teacher(trial: Trial, config: Config, rows: Rows, number: int) -> None:
    """Compare the vocabulary of each teacher with the policy's, and count the rows that have no teacher."""
    from rollout.episodes.prompts import load_tokenizer
    from rollout.teachers.scoring import Teachers
    from rollout.teachers.vocabulary import other_vocabularies

    try:
        Teachers(config.teacher, config.run.path / "keys")
    except ValueError as error:
        trial.found.refused.append(one_line(error))
    late = f"teacher: its tokenizer was not loaded within {TEACHER_S:g} s, so its vocabulary is not compared here"
    with trial.limit(TEACHER_S, trial.found.warnings, late):
        try:
            trial.found.refused += other_vocabularies(config, load_tokenizer(config))
        except ValueError:  # the trial of the prompts reports the policy's tokenizer
            return
    known = config.teacher.teachers
    without = [n for n, row in rows if str(row.get("data_source", "")) not in known and "" not in known]
    if not without:
        return
    share = f"{len(without):,} of {len(rows):,} rows looked at have a data_source without a teacher"
    share = f"{share}, such as row {without[0]}"
    if config.reward.function == NO_REWARD:
        remedy = "nothing is learned from them; set teacher.model for them, or leave them out of the data"
        found = trial.found.refused if len(without) == len(rows) else trial.found.warnings
        found.append(f"teacher.by_source: {share}: {remedy}")
    else:
        trial.found.facts.append(f"note: {share}: they are trained by their reward alone")


PARTS: dict[str, tuple[str, Callable[[Trial, Config, Rows, int], None]]] = {
    "prompts": ("model.path", prompts),
    "architecture": ("model.path", architecture),
    "algorithm": ("algorithm.loss", algorithm),
    "reward": ("reward.function", reward),
    "task": ("rollout.task", task),
    "teacher": ("teacher.model", teacher),
}


def one_line(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()))


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:297]}..."


def both_ends(text: str) -> str:
    """Shorten the middle of a prompt: both its beginning and its end matter."""
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-95:]}"


if __name__ == "__main__":
    inner_words("PART", "FOLDER")
    fork_guarded()
    main(sys.argv[1:])
