"""Chat templates like those of the models that people train, written small, and a tokenizer that knows their tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "</answer>"]
MERGES = [("o", "k"), ("1", "2"), ("a", "b"), ("ab", "c"), ("Ċ", "Ċ"), ("t", "h"), ("Ġ", "a"), ("e", "r")]
"""Texts have several encodings: whoever encodes again what was sampled gets other tokens."""

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TOOLS = """{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'Be useful.' }}
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""

CALLS = """{% for call in m.tool_calls %}{% if not loop.first or m.content %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ '<|im_end|>\\n' }}"""

RESULTS = """{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>' }}
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}"""

QWEN25 = (
    TOOLS
    + """{%- for m in messages %}{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' and not m.tool_calls %}<|im_start|>assistant
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}"""
    + CALLS
    + "{% elif m.role == 'tool' %}"
    + RESULTS
    + """{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)

QWEN3 = (
    TOOLS
    + """{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for m in messages[::-1] %}{% if ns.searching and m.role == 'user' %}{% set ns.searching = false %}
{%- set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}{% set said = m.content %}
{%- if not thought and '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought.strip('\\n') }}
</think>

{% endif %}{{ said }}{% if m.tool_calls %}"""
    + CALLS
    + """{% else %}<|im_end|>
{% endif %}{% elif m.role == 'tool' %}"""
    + RESULTS
    + """{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
)

LLAMA3 = """<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>

{{ tools | tojson }}<|eot_id|>{% endif %}{% for m in messages %}{% if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}
{%- else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant
{%- endif %}{% if add_generation_prompt %}<|end_header_id|>

{% endif %}"""

MISTRAL = """<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric with length 9!') }}{% endif %}
{%- if not loop.first %}, {% endif %}{"name": "{{ call.function.name }}", "arguments":
{{- call.function.arguments | tojson }}, "id": "{{ call.id }}"}{% endfor %}]</s>
{%- elif m.role == 'assistant' %}{{ m.content }}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}
{%- raw %}[/TOOL_RESULTS]{% endraw %}{% else %}{{ raise_exception('Only user, assistant and tool roles!') }}{% endif %}
{%- endfor %}"""

R1 = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
"""Strips the thinking of every answer, also of the last one."""

TURNS = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
"""Without any special token."""

TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "qwen2.5": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "r1": (R1, "<|im_end|>"),
    "turns": (TURNS, "<|endoftext|>"),
    "base": (CHATML, "<|endoftext|>"),  # its end is not the one that the template writes
}


def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the template `name`, whose end ends an answer."""
    template, end = TEMPLATES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    words = [*alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, chat_template=template, clean_up_tokenization_spaces=False
    )
