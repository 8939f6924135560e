"""Chat templates in the form of public models' ones, in one line each: how they close a turn and switch thinking."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|user|>", "<|assistant|>", "<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|message|>", "<|channel|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "<|eos|>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>", "<|open|>", "<|close|>", "<|sep|>"),
    *("<|end_of_msg|>", "</s>", "[INST]", "[/INST]", "<seed:bos>", "<seed:eos>"),
]
EACH, NEXT, END = "{% for m in messages %}", "{% endfor %}", "{% endif %}"
USER, MODEL, ASKED = "{% if m.role == 'user' %}", "{% if m.role == 'assistant' %}", "{% if add_generation_prompt %}"
SAID = "{{ m.content }}"
HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
CHATML = f"{EACH}<|im_start|>{{{{ m.role }}}}\n{SAID}<|im_end|>\n{NEXT}"
LLAMA = f"{EACH}<|start_header_id|>{{{{ m.role }}}}<|end_header_id|>\n\n{SAID}<|eot_id|>{NEXT}"
ROLES = f"{EACH}<|{{{{ m.role }}}}|>\n{SAID}"
HARMONY = f"{EACH}<|start|>{{{{ m.role }}}}{MODEL}<|channel|>final{END}<|message|>{SAID}"
KIMI = f"{EACH}<|open|>message {{{{ m.role }}}}<|sep|>{MODEL}<|open|>response<|sep|>{END}{SAID}"
COHERE = f"{EACH}<|START_OF_TURN_TOKEN|>{{{{ m.role }}}}{SAID}{MODEL}<|END_RESPONSE|>{END}<|END_OF_TURN_TOKEN|>{NEXT}"
SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nHi<|im_end|>\n{% endif %}"

CLOSINGS = {
    "Qwen 2.5 base": (SYSTEM + CHATML, "<|im_end|>"),
    "Llama 3": (LLAMA + ASKED + HEADER + END, "<|eot_id|>"),
    "Llama 3, always with the next header": (LLAMA + HEADER, "<|eot_id|>"),
    "Mistral": (f"{EACH}{USER}[INST] {SAID}[/INST]{{% else %}} {SAID}</s>{END}{NEXT}", "</s>"),
    "Gemma 3": (f"<bos>{EACH}<start_of_turn>{{{{ m.role }}}}\n{SAID}<end_of_turn>\n{NEXT}", "<end_of_turn>"),
    "Phi 3": (f"{ROLES}<|end|>\n{NEXT}{ASKED}<|assistant|>\n{{% else %}}<|endoftext|>{END}", "<|end|>"),
    "GLM-4": (f"{ROLES}{NEXT}{ASKED}<|assistant|>\n{END}", "<|user|>"),
    "gpt-oss": (HARMONY + "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}" + NEXT, "<|return|>"),
    "DeepSeek-V3": (f"{EACH}{USER}<|User|>{SAID}{{% else %}}<|Assistant|>{SAID}<|eos|>{END}{NEXT}", "<|eos|>"),
    "Command R7B": (COHERE, "<|END_OF_TURN_TOKEN|>"),
    "Kimi K3": (
        f"{KIMI}{MODEL}<|close|>response<|sep|>{END}<|close|>message<|sep|><|end_of_msg|>{NEXT}{ASKED}<|open|>{END}",
        "<|end_of_msg|>",
    ),
    "Seed-OSS": (f"{EACH}<seed:bos>{{{{ m.role }}}}\n{SAID}<seed:eos>{NEXT}", "<seed:eos>"),
    "without special tokens": (f"{EACH}{{{{ m.role }}}}: {SAID}\n{NEXT}", None),
    "one that refuses answers": (f"{EACH}{MODEL}{{{{ raise_exception('no') }}}}{END}{NEXT}", None),
}
"""Template and the token with which it ends an assistant's turn, by family."""

OPEN = CHATML + "<|im_start|>assistant\n"
SWITCHED: dict[str, tuple[str, dict[str, object] | None]] = {
    "Qwen 3": (
        OPEN + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
        {"enable_thinking": False},
    ),
    "GLM-4.5": (
        ASKED + "{{ '<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}" + END,
        {"enable_thinking": False},
    ),
    "Gemma 4": ("{% if enable_thinking | default(false) %}<|think|>{% endif %}" + OPEN, {"enable_thinking": False}),
    "DeepSeek-V3.1": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        + OPEN
        + "{{ '<think>' if thinking else '</think>' }}",
        {"thinking": False},
    ),
    "Granite 3.3": (
        "{% if messages[0].role != 'system' and thinking %}Think.{% endif %}" + OPEN,
        {"thinking": False},
    ),
    "Command A Reasoning": (
        "{% set reasoning = reasoning if reasoning is not undefined else true %}"
        + OPEN
        + "{% if not reasoning %}<|START_THINKING|><|END_THINKING|>{% endif %}",
        {"reasoning": False},
    ),
    "Seed-OSS": (
        "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}"
        + OPEN
        + "{% if thinking_budget == 0 %}<seed:think>{% endif %}",
        {"thinking_budget": 0},
    ),
    "DeepSeek-R1": (OPEN + "<think>\n", None),
    "a field of messages": (EACH + "{{ m.thinking }}" + SAID + NEXT, None),
    "gpt-oss": ("Reasoning: {{ reasoning_effort or 'medium' }}" + OPEN, None),
}
"""Template and its argument for `rollout.chat.thinking: off`, by family; None: it has no switch."""


def family_tokenizer(template: str, eos: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of all these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, chat_template=template)
