"""Chat templates in the form of public models' ones, in one line each: how they close a turn and switch thinking."""

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|user|>", "<|assistant|>", "<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|message|>", "<|channel|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>", "<|open|>", "<|close|>", "<|sep|>"),
    *("<|end_of_msg|>", "</s>", "[INST]", "[/INST]", "<seed:bos>", "<seed:eos>"),
]
EACH = "{% for m in messages %}"
MODEL = "{% set r = 'model' if m.role == 'assistant' else m.role %}"
CHATML = EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GLM = EACH + "<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA = EACH + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"

CLOSINGS = {
    "Qwen 2.5 base": ("{% if messages[0].role != 'system' %}<|im_start|>system\nHi<|im_end|>\n{% endif %}" + CHATML, "<|im_end|>"),
    "Llama 3": (LLAMA + "{% if add_generation_prompt %}" + HEADER + "{% endif %}", "<|eot_id|>"),
    "Llama 3, always with the next header": (LLAMA + HEADER, "<|eot_id|>"),
    "Mistral": (EACH + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}", "</s>"),
    "Gemma 3": ("<bos>" + EACH + MODEL + "<start_of_turn>{{ r }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}", "<end_of_turn>"),
    "Phi 3": (EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}", "<|end|>"),
    "GLM-4": (GLM + "{% endif %}", "<|user|>"),
    "gpt-oss": (EACH + "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}", "<|return|>"),
    "DeepSeek-V3": (EACH + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    "Command R7B": (EACH + "<|START_OF_TURN_TOKEN|>{{ m.role }}{{ m.content }}{% if m.role == 'assistant' %}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}", "<|END_OF_TURN_TOKEN|>"),
    "Kimi K3": (EACH + "<|open|>message {{ m.role }}<|sep|>{% if m.role == 'assistant' %}<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>{% else %}{{ m.content }}{% endif %}<|close|>message<|sep|><|end_of_msg|>{% endfor %}{% if add_generation_prompt %}<|open|>message assistant<|sep|>{% endif %}", "<|end_of_msg|>"),
    "Seed-OSS": (EACH + "<seed:bos>{{ m.role }}\n{{ m.content }}<seed:eos>{% endfor %}", "<seed:eos>"),
    "without special tokens": (EACH + "{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
    "one that refuses answers": (EACH + "{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}", None),
}  # fmt: skip
"""Template and the token with which it ends an assistant's turn, by family."""

ASKED = CHATML + "<|im_start|>assistant\n"
SWITCHED = {
    "Qwen 3": (ASKED + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}", {"enable_thinking": False}),
    "GLM-4.5": ("{% if add_generation_prompt %}{{ '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}{% endif %}", {"enable_thinking": False}),
    "Gemma 4": ("{% if enable_thinking is defined and enable_thinking %}<|think|>{% endif %}" + ASKED, {"enable_thinking": False}),
    "DeepSeek-V3.1": ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}" + ASKED + "{{ '<think>' if thinking else '</think>' }}", {"thinking": False}),
    "Granite 3.3": ("{% if messages[0].role != 'system' and thinking %}Think.{% endif %}" + ASKED, {"thinking": False}),
    "Command A Reasoning": ("{% set reasoning = reasoning if reasoning is not undefined else true %}" + ASKED + "{% if not reasoning %}<|START_THINKING|><|END_THINKING|>{% endif %}", {"reasoning": False}),
    "Seed-OSS": ("{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}" + ASKED + "{% if thinking_budget == 0 %}<seed:think>{% endif %}", {"thinking_budget": 0}),
    "DeepSeek-R1": (ASKED + "<think>\n", None),
    "a field of messages": (EACH + "{{ m.thinking }}{{ m.content }}{% endfor %}", None),
    "gpt-oss": ("Reasoning: {{ reasoning_effort or 'medium' }}" + ASKED, None),
}  # fmt: skip
"""Template and its argument for `rollout.chat.thinking: off`, by family; None: it has no switch."""


def family_tokenizer(template: str, eos: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of all these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, chat_template=template)
