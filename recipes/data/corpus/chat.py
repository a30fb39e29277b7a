"""Encode conversations as tokens and mask all but the answers."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
Messages = Sequence[Mapping[str, Any]]

# Marks in renderings are between noncharacters of Unicode, which no text has.
_MARK = re.compile("\ufdd0(\\d+)\ufdd1")
_GENERATED = re.compile("[\ufdd2\ufdd3]")
_REMEDY = "put the answers of the template into {% generation %} … {% endgeneration %}"


def chat_encoder(
    tokenizer: Tokenizer, template: str | None, when: float = 0.0
) -> Callable[[Messages], Encoded]:
    """Return what turns messages into tokens, and into which of them are to be learned, bool.

    Tokens are those of the whole rendering, which may depend on later messages. The text in the
    template's `{% generation %}` blocks is to be learned; of a template without them, what each
    answer contributes to the rendering:

    - It begins where a prompt for it would end: the messages before it are rendered with
      `add_generation_prompt`, and what this has behind their last content is compared with what the
      whole has there. A thought that only the prompt opens is no part of either. A content
      that begins as such a thought does is learned whole.
    - It ends where the messages up to it end, compared in the same way, so that the end of a turn
      is to be learned.

    Contents are found by marks in them. A conversation is refused if the template does other things
    with a marked content, or if an answer does not end behind its beginning.

    Args:
        tokenizer: the tokenizer.
        template: a name in `TEMPLATES` or of one that the tokenizer has, a file of Jinja, or None:
            the tokenizer's own.
        when: the time of the template's `strftime_now`, in seconds since 1970, UTC.

    Raises:
        InputError: there is no such template.
    """
    render = _renderer(tokenizer, template, when)

    def encode(messages: Messages) -> Encoded:
        """Encode messages, as `checked_value` returns them; raises ValueError for bad ones."""
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no message is the assistant's, so that nothing is to be learned")
        pieces = _GENERATED.split(render(messages, False))
        text = "".join(pieces)
        check_text(text)
        tokens, first, last = tokenizer.place(text)
        learned = np.zeros(len(tokens), bool)
        ends = list(accumulate(map(len, pieces)))
        for start, stop in zip(ends[::2], ends[1::2], strict=False):
            learned |= (last > start) & (first < stop)
        if len(pieces) == 1:
            for start, stop in _answers(render, messages, text):
                learned |= (last > start) & (last <= stop)
        if not learned.any():
            raise ValueError("the chat template leaves its answers out, or they have no token")
        return tokens, learned

    return encode


def _answers(
    render: Callable[[Messages, bool], str], messages: Messages, text: str
) -> Iterator[tuple[int, int]]:
    """Yield where each answer begins and ends in `text`, the rendering of all messages."""
    # A template may look at how a content begins or ends; a mark in the middle does not change it.
    for share in (1.0, 0.5, 0.0):
        marked = [_marked(messages, number, share) for number in range(len(messages))]
        pieces = _MARK.split(render(marked, False))
        if "".join(pieces[::2]) == text:
            break
    else:
        raise ValueError(f"the chat template hides where answers lie; {_REMEDY}")
    ends = accumulate([0, *map(len, pieces[::2])])
    places = dict(zip(["", *pieces[1::2]], ends, strict=False))

    def end_of(count: int, prompts: bool) -> int:
        """Return where in `text` the rendering of the first messages ends."""
        *_, number, tail = ("", *_MARK.split(render(marked[:count], prompts)))
        at = places.get(number, len(text))  # a content that is left out refuses the answer
        return at + len(commonprefix([tail, text[at:]]))  # noqa: RUF071 (these are no paths)

    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop = end_of(number, True), end_of(number + 1, False)
            if stop <= start:
                raise ValueError(
                    f"the chat template hides where the answer in message {number + 1} lies, or "
                    f"leaves it out; {_REMEDY}"
                )
            at = places.get(str(number), len(text))
            said = _MARK.split(marked[number].get("content", ""))[0]
            yield min(start, at - len(said)) if text[:at].endswith(said) else start, stop


def _marked(messages: Messages, number: int, share: float) -> Mapping[str, Any]:
    """Return a message with a mark in its content if it is an answer or stands before one.

    Without content, the mark is in the names of the tools that it calls.
    """
    message, mark = messages[number], f"\ufdd0{number}\ufdd1"
    if all(one["role"] != "assistant" for one in messages[number : number + 2]):
        return message
    content = message.get("content", "")
    if core := content.strip():
        place = content.index(core) + int(share * len(core))
        return {**message, "content": content[:place] + mark + content[place:]}
    named = json.dumps(message, default=str).replace('"name": "', f'"name": "{mark}')
    marked: Mapping[str, Any] = json.loads(named)
    return marked


def template_text(tokenizer: Tokenizer, template: str | None) -> str:
    """Return the Jinja of a chat template, as `chat_encoder` takes it; raises InputError."""
    named = TEMPLATES | tokenizer.templates
    if (name := "default" if template is None else template) in named:
        return named[name]
    if template is not None and Path(template).expanduser().is_file():
        return Path(template).expanduser().read_text()
    what = "the tokenizer brings no chat template" if template is None else "there is none such"
    raise InputError(
        f"dataset.chat_template={'null' if template is None else template}: {what}; "
        f"name a file of Jinja, or one of {', '.join(named)}"
    )


def _renderer(
    tokenizer: Tokenizer, template: str | None, when: float
) -> Callable[[Messages, bool], str]:
    """Return what renders messages in the environment that `transformers` gives a template.

    Generation blocks are rendered between marks.
    """
    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(
        extensions=extensions, trim_blocks=True, lstrip_blocks=True
    )

    def fail(message: str) -> str:
        raise ValueError(message)

    clock = datetime.fromtimestamp(when, UTC).strftime
    environment.globals |= {"raise_exception": fail, "strftime_now": clock}
    # Jinja's own escapes HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.filters["generation"] = "\ufdd2{}\ufdd3".format
    text = template_text(tokenizer, template)
    for tag, block in {"generation": "filter generation", "endgeneration": "endfilter"}.items():
        text = re.sub(rf"({{%[-+]?\s*){tag}\b", rf"\1{block}", text)
    try:
        compiled = environment.from_string(text)
    except TemplateError as error:
        named = "the tokenizer's" if template is None else f"dataset.chat_template={template}"
        raise InputError(
            f"{named}: not a valid Jinja chat template ({error}); name another"
        ) from None

    def render(messages: Messages, prompts: bool) -> str:
        # Templates speak of the first message; without any they fail, and there is nothing to say.
        if not messages and not prompts:
            return ""
        asked = {"messages": messages, "add_generation_prompt": prompts}
        try:
            return compiled.render(tokenizer.special, tools=None, documents=None, **asked)
        except (TemplateError, ArithmeticError, AttributeError, TypeError, LookupError) as error:
            raise ValueError(f"the chat template fails on it: {error}") from None

    return render
