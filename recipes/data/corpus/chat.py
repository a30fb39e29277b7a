"""Encode conversations as tokens and mask all but the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.recipes.data.corpus.documents import check_text
from launcher.recipes.protocols import InputError, Tokenizer

# Named templates, for tokenizers that bring none.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
}

Encoded = tuple[np.ndarray, np.ndarray]


def chat_encoder(
    tokenizer: Tokenizer, template: str | None
) -> Callable[[Sequence[Mapping[str, str]]], Encoded]:
    """Return what turns messages into tokens, and into which of them are to be learned, bool.

    Args:
        tokenizer: the tokenizer.
        template: a name in `TEMPLATES`, a file of Jinja, or None: the tokenizer's own.

    Raises:
        InputError: there is no such template.
    """
    render = _renderer(tokenizer, template)

    def encode(messages: Sequence[Mapping[str, str]]) -> Encoded:
        """Encode messages, as `checked_value` returns them; raises ValueError for bad ones."""
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no message is the assistant's, so that nothing is to be learned")
        parts, learned, before = [], [], ""
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = render(messages[:index], True)
                whole = render(messages[: index + 1], False)
                if not (prompt.startswith(before) and whole.startswith(prompt)):
                    raise ValueError("the chat template changes the messages before an answer")
                parts += [prompt[len(before) :], whole[len(prompt) :]]
                learned += [False, True]
                before = whole
        end = render(messages, False)
        if end.startswith(before) and len(end) > len(before):
            parts, learned = [*parts, end[len(before) :]], [*learned, False]
        check_text(end)
        made = tokenizer.encode(parts)
        mask = [np.full(len(one), is_ours) for one, is_ours in zip(made, learned, strict=True)]
        tokens = np.concatenate(made)
        if not len(tokens):
            raise ValueError("it has no token")
        return tokens, np.concatenate(mask)

    return encode


def _renderer(tokenizer: Tokenizer, template: str | None) -> Callable[[Any, bool], str]:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    text = tokenizer.chat_template if template is None else TEMPLATES.get(template)
    if text is None and template is not None and Path(template).expanduser().is_file():
        text = Path(template).expanduser().read_text()
    if text is None:
        what = "the tokenizer brings no chat template" if template is None else "there is none such"
        raise InputError(
            f"dataset.chat_template={'null' if template is None else template}: {what}; "
            f"name a file of Jinja, or one of {', '.join(TEMPLATES)}"
        )
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def fail(message: str) -> str:
        raise ValueError(message)

    environment.globals["raise_exception"] = fail
    try:
        compiled = environment.from_string(text)
    except TemplateError as error:
        named = "the tokenizer's" if template is None else f"dataset.chat_template={template}"
        raise InputError(
            f"{named}: not a valid Jinja chat template ({error}); name another"
        ) from None

    def render(messages: Any, prompts: bool) -> str:
        # Templates speak of the first message; without any they fail, and there is nothing to say.
        if not messages and not prompts:
            return ""
        try:
            return compiled.render(
                messages=messages, add_generation_prompt=prompts, **tokenizer.special
            )
        except (TemplateError, TypeError, LookupError) as error:
            raise ValueError(f"the chat template fails on it: {error}") from None

    return render
