"""A tiny model that has learnt two conversations by heart, in which it calls a tool, and an agent that has this tool.

The agent knows an OpenAI base URL and nothing else; for `test_chat_engine.py`.
"""

import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ROWS = [{"problem": "13 + 30?", "answer": "43"}, {"problem": "21 + 34?", "answer": "55"}]
HEADER, END = "<|im_start|>assistant\n", "<|im_end|>"
LARGEST_LOSS = 0.05
"""Largest loss of a token once the model has learnt them: then each is its greedy choice."""


def solve(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """The agent: adds what the model asks it to, until the model calls no tool."""
    messages, calls, called = [{"role": "user", "content": row["problem"]}], 0, True
    while called:
        body = json.dumps({"messages": messages, "tools": TOOLS}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urlopen(Request(f"{base_url}/chat/completions", body, headers)) as answer:
            choice = json.load(answer)["choices"][0]
        messages.append(choice["message"])
        called = choice["finish_reason"] == "tool_calls"
        for call in choice["message"].get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            result = {"role": "tool", "tool_call_id": call["id"], "content": str(given["a"] + given["b"])}
            messages.append(result)
            calls += 1
    return {"score": float(messages[-1]["content"] == f"It is {row['answer']}."), "calls": float(calls)}


def conversation(row: dict[str, str]) -> list[dict[str, Any]]:
    """All that is said about a row."""
    first, _, second = row["problem"].removesuffix("?").split()
    function = {"name": "add", "arguments": {"a": int(first), "b": int(second)}}
    return [
        {"role": "user", "content": row["problem"]},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": row["answer"]},
        {"role": "assistant", "content": f"It is {row['answer']}."},
    ]


def text_of(tokenizer: Any, row: dict[str, str]) -> str:
    """The conversation as the chat template writes it, up to the end of the last answer."""
    text = tokenizer.apply_chat_template(conversation(row), tools=TOOLS, tokenize=False)
    return text[: text.rindex(END) + len(END)]


def teach(config: Any, tokenizer: Any, folder: Path) -> None:
    """Make a model of this config that says what the conversations have of it, and save it with its tokenizer."""
    import torch  # agents import this file too
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    tokens = torch.tensor([tokenizer.encode(text_of(tokenizer, row), add_special_tokens=False) for row in ROWS])
    own = sampled(tokenizer, tokens[0].tolist())
    model = Qwen2ForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0)
    for _ in range(1000):
        logits = model(tokens).logits[:, [place - 1 for place in own]]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, own], reduction="none")
        if losses.max() < LARGEST_LOSS:
            break
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    assert losses.max() < LARGEST_LOSS
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sampled(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Places of what the model says in a conversation: all between the header of an answer and its end."""
    header, end = tokenizer.encode(HEADER, add_special_tokens=False), tokenizer.convert_tokens_to_ids(END)
    starts = [at + len(header) for at in range(len(tokens)) if tokens[at : at + len(header)] == header]
    return [place for start in starts for place in range(start, tokens.index(end, start) + 1)]
