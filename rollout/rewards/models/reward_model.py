"""The reward `reward_model`: the raw logit of a sequence classification model, from `vllm serve` in its pooling
mode."""

from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr, model_validator

from rollout.errors import RewardError
from rollout.rewards.models.http_model import AnswerTemplate, HttpModel
from rollout.templates.renderer import ChatTexts, Renderer, RenderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardModel(HttpModel):
    """`model` is a folder or hub name. Its chat template makes the texts, unless `template` does."""

    template: str | None = None
    """Jinja template of the whole text, with a judge's names; null: the chat template. The server adds special
    tokens."""
    _text: AnswerTemplate | None = PrivateAttr(None)
    _tokenizer: Any = PrivateAttr(None)
    _chats: ChatTexts = PrivateAttr()

    @model_validator(mode="after")
    def _prepare(self) -> "RewardModel":
        if self.template is None:
            self._tokenizer = self._load_tokenizer()
            self._chats = ChatTexts(self._tokenizer, Renderer())
        else:
            self._text = AnswerTemplate(self.template)
        return self

    def _load_tokenizer(self) -> "PreTrainedTokenizerBase":
        if self.model is None:
            raise ValueError("nothing says how its texts are made; set model, whose chat template does, or template")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.model)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"no tokenizer can be loaded from model {self.model}: {reason}") from None
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer of model {self.model} has no chat template; set template")
        return tokenizer

    async def __call__(
        self, solution_strs: list[str], ground_truths: list[Any], rows: list[dict[str, Any]]
    ) -> list[float]:
        """Return a logit for each answer. Raises RewardError."""
        body = {"input": self.question(solution_strs, ground_truths, rows), "use_activation": False}
        reply = await self.post("/classify", body)
        try:
            found = sorted(reply["data"], key=lambda one: one["index"])
            logits = [one["probs"] for one in found]
        except (KeyError, TypeError):
            raise RewardError(f"reward_model: its server answered no classes but {str(reply)[:200]}") from None
        if len(logits) != len(solution_strs) or any(len(each) != 1 for each in logits):
            shape = f"{len(logits)} results of {len(logits[0]) if logits else 0} classes"
            raise RewardError(f"reward_model: {shape} for {len(solution_strs)} answers; it needs a model of one class")
        return [each[0] for each in logits]

    def question(
        self, solution_strs: list[str], ground_truths: list[Any], rows: list[dict[str, Any]]
    ) -> list[str | list[int]]:
        return [self._input(*one) for one in zip(solution_strs, ground_truths, rows, strict=True)]

    def _input(self, answer: str, truth: Any, row: dict[str, Any]) -> str | list[int]:
        if self._text is not None:
            return self._text.render(answer, truth, row)
        prompt = row.get("prompt") or row.get("problem")
        if not prompt:
            names = ", ".join(row)
            raise RewardError(f"reward_model: the row has neither prompt nor problem, but {names}", permanent=True)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chat = [{**one, "content": text_of(one.get("content"))} for one in messages]
        begun = chat.pop()["content"] if chat[-1]["role"] == "assistant" else ""
        chat.append({"role": "assistant", "content": begun + answer})
        try:
            text = self._chats.render(chat, False)
        except RenderError as error:
            why = error.about("the row", f"the chat template of model {self.model}")
            raise RewardError(f"reward_model: {why}", permanent=True) from None
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text without images and tool calls."""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())
