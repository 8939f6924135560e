"""Logs a server's first prompt, as the model reads it, and its first answer: they show most mistakes."""

import logging

from rollout.episodes.prompts import Prompts
from rollout.rewards.convention import Answer, Score
from rollout.tasks.trajectory import Problem, Trajectory

log = logging.getLogger(__name__)
MOST_CHARS = 2000


class FirstShown:
    def __init__(self, prompts: Prompts) -> None:
        self._prompts, self._left = prompts, {"prompt", "answer"}

    def prompt(self, problem: Problem) -> None:
        if "prompt" not in self._left:
            return
        self._left.discard("prompt")
        stops = " ".join(map(str, self._prompts.tokenizer.convert_ids_to_tokens(self._prompts.stops)))
        ends = f"an answer ends at {stops}" if stops else "nothing ends an answer but its length"
        truth = Answer("", 0, problem.row).shown_truth()
        shown = shortened(self._prompts.shown(problem.prompt), MOST_CHARS)
        words = "the first prompt: %d tokens; %s; ground truth: %s\n%s\n(end of the first prompt)"
        log.info(words, len(problem.prompt), ends, shortened(truth, MOST_CHARS // 4), shown)

    def answer(self, trajectory: Trajectory, score: Score) -> None:
        if "answer" not in self._left:
            return
        self._left.discard("answer")
        tokens = trajectory.tokens[trajectory.start :]
        figures = ", ".join(f"{name} {value:g}" for name, value in {"reward": score.reward, **score.metrics}.items())
        shown = shortened(self._prompts.shown(tokens), MOST_CHARS)
        words = "the first answer: %d tokens, finish %s; %s\n%s\n(end of the first answer)"
        log.info(words, len(tokens), trajectory.finish, figures, shown)


def shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
