"""Translates `rollout.chat.thinking` into the argument by which a chat template switches thinking on and off."""

from collections.abc import Mapping
from typing import Any

from rollout.templates.renderer import ChatTexts
from rollout.templates.turn_ends import UNUSABLE

SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning": (True, False),
    "thinking_budget": (-1, 0),
}
"""Values for on and off.

`enable_thinking`: Qwen 3, GLM-4.5, Gemma 4 and others. `thinking`: DeepSeek-V3.1, Granite 3.2. `reasoning`: Command A.
`thinking_budget`: Seed-OSS.
"""


def thinking_arguments(
    wanted: bool, texts: ChatTexts, kwargs: Mapping[str, Any], system: str | None, template: str
) -> dict[str, Any]:
    """Return the template's arguments for `wanted`. Some templates ignore their switch with a `system` prompt. Raises
    ValueError.

    An argument is the switch if its values give different prompts: a template may name it for something else.
    """
    if twice := next((name for name in SWITCHES if name in kwargs), None):
        raise ValueError(f"rollout.chat.template_kwargs.{twice} says it too; remove one of them")
    chat = [{"role": "user", "content": "1"}]
    chat = chat if system is None else [{"role": "system", "content": system}, *chat]
    for name, values in SWITCHES.items():
        try:
            on, off = (texts.render(chat, True, kwargs={**kwargs, name: value}) for value in values)
        except UNUSABLE:
            continue
        if on != off:
            return {name: values[not wanted]}
    hint = "remove the key"
    if "reasoning_effort" in template:
        hint = "set rollout.chat.template_kwargs: {reasoning_effort: low} or another effort instead"
    elif system is not None and any(name in template for name in SWITCHES):
        hint = "it may ignore its switch where data.system_prompt is set: leave that out, or remove the key"
    known = ", ".join(SWITCHES)
    raise ValueError(f"the chat template has no switch for thinking: none of {known} changes a prompt; {hint}")
