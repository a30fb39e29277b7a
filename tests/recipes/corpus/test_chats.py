"""`chat.py`: conversations by the templates that people's tokenizers bring."""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tokenizer_forms import CHAT, CHATML, write

from launcher.recipes import InputError
from launcher.recipes.data.corpus.chat import chat_encoder
from launcher.recipes.data.corpus.files import find_corpus
from launcher.recipes.data.corpus.tokenizers import load_tokenizer
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.prepare import prepare_corpus, up_to_date

TURN = "{{- '<' + m.role + '>' + m.content + '</>' }}"
PROMPT = "{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
TALK = [
    {"role": role, "content": text}
    for role, text in zip(["user", "assistant"] * 2, "QARB", strict=True)
]
LAST, SYSTEM = TALK[-1], {"role": "system", "content": "S"}
CALL = [{"function": {"name": "f", "x": "ü<"}}]
WHOLE = "<user>Q</><assistant>A</><user>R</><assistant>B</>"


def each(body, prompt=PROMPT):
    return "{%- for m in messages %}" + body + "{%- endfor %}" + prompt


# Of each: the template, the conversation, the whole rendering, and what of it is learned.
CASES = {
    # Qwen 3: a thought stays in the answers to the last question alone.
    "last thought": (
        "{%- set ns = namespace(last=0) %}"
        + each("{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}", "")
        + each(
            "{{- '<' + m.role + '>' }}{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
            "{{- '<think>' + m.thought|default('') + '</think>' }}{%- endif %}"
            "{{- m.content + '</>' }}"
        ),
        [*TALK[:3], {**LAST, "thought": "hm"}], WHOLE.replace("B", "<think>hm</think>B"),
        "A</>|<think>hm</think>B</>",
    ),
    # DeepSeek R1: the prompt opens a thought, which is cut out of written answers.
    "opened thought": (
        each(
            TURN.replace("content", "content.split('</think>')[-1]"),
            PROMPT.replace("<assistant>", "<assistant><think>"),
        ),
        [TALK[0], {**LAST, "content": "<A"}, TALK[2], {**LAST, "content": "<think>so</think>B"}],
        WHOLE.replace("A", "<A"), "<A</>|B</>",
    ),
    # Mistral: what the system says stands before the last question.
    "system later": (
        each(
            "{%- if m.role == 'user' %}{{- '[' }}{%- if loop.revindex <= 2 %}"
            "{{- messages[0].content + ': ' }}{%- endif %}{{- m.content + ']' }}"
            "{%- elif m.role == 'assistant' %}{{- m.content + '</>' }}{%- endif %}", "",
        ),
        [SYSTEM, *TALK], "[Q]A</>[S: R]B</>", "A</>|B</>",
    ),
    "end of all": (
        each(TURN, "{%- if not add_generation_prompt %}{{- '[end]' }}{%- endif %}" + PROMPT),
        TALK, WHOLE + "[end]", "A</>|B</>[end]",
    ),
    "environment": (
        "{{- strftime_now('%b %Y') }}"
        + each(
            "{%- if m.role == 'system' %}{%- continue %}{%- endif %}{{- m.role }}"
            "{%- if m.role == 'assistant' %}{% generation %}{{- m.content }}{% endgeneration %}"
            "{%- break %}{%- else %}{{- m.content }}{%- endif %}"
        ),
        [SYSTEM, *TALK], "Jan 1970userQassistantA", "A",
    ),
    "tools": (
        each(
            "{{- '<' + m.role + '>' }}{%- if m.role == 'assistant' and loop.last %}{{- '<think>' }}"
            "{%- endif %}{%- if m.content %}{{- m.content }}{%- endif %}{%- for c in m.tool_calls "
            "or [] %}{{- c.function|tojson }}{%- endfor %}{{- '</>' }}"
        ) + "{%- if tools is not none or documents is not none %}{{- 'none' }}{%- endif %}",
        [TALK[0], {"role": "assistant", "tool_calls": CALL}, *TALK[2:]],
        WHOLE.replace("A", '{"name": "f", "x": "ü<"}').replace("B", "<think>B"),
        '{"name": "f", "x": "ü<"}</>|<think>B</>',
    ),
    "looks at the end": (
        each(TURN.replace("'<'", "('!' if m.content.endswith('Q') else '<')")),
        [{"role": "user", "content": "QQ"}, TALK[1]], "!user>QQ</><assistant>A</>", "A</>",
    ),
}  # fmt: skip


def encoder(tmp_path, template):
    (tmp_path / "t.jinja").write_text(template)
    return chat_encoder(load_tokenizer("bytes"), str(tmp_path / "t.jinja"))


@pytest.mark.parametrize("case", CASES)
def test_what_answers_contribute_to_the_whole_is_learned(case, tmp_path):
    template, talk, whole, answers = CASES[case]
    tokens, learned = encoder(tmp_path, template)(talk)
    decode = load_tokenizer("bytes").decode
    assert decode(tokens) == whole
    assert decode(tokens[learned]) == answers.replace("|", "")


@pytest.mark.parametrize(
    "template",
    [
        each("{{- m.content|length }}"),  # no content is in it
        each("{%- if loop.index0 != 1 %}" + TURN + "{%- endif %}"),  # leaves an answer out
        each(TURN).replace("messages", "messages[-1:]"),  # leaves out what it answers
        "",
        each(TURN) + "{% generation %}{% endgeneration %}",
    ],
)
def test_a_template_that_hides_answers_is_refused(template, tmp_path):
    said = r"hides where .*; put the answers of the .* into {% gener|leaves its answers out"
    with pytest.raises(ValueError, match=said):
        encoder(tmp_path, template)(TALK[:2])


def corpus_of(tmp_path, tokenizer, **settings):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    if not source.exists():
        source.write_text(json.dumps({"messages": CHAT}) + "\n")
    work = Documents(
        path=str(source), field="messages", tokenizer=str(tokenizer), tokens=str(out), **settings
    )
    prepare_corpus(work, 1)
    corpus = find_corpus(str(out))
    tokens = corpus.tokens(0, corpus.count)
    return work, tokens, corpus.learned(0, corpus.count)


def test_the_clock_of_a_template_is_the_sources_and_a_changed_template_is_noticed(tmp_path):
    folder = write("qwen", tmp_path / "own")
    (folder / "chat_template.jinja").write_text("{{- strftime_now('%d %b %Y') }}" + each(TURN))
    corpus_of(tmp_path, folder)
    os.utime(tmp_path / "a.jsonl", (0, 1e9))
    work, tokens, _ = corpus_of(tmp_path, folder)
    text = load_tokenizer(str(folder)).decode(tokens.tolist())
    assert text.startswith("09 Sep 2001<user>one")
    assert up_to_date(work)
    (folder / "chat_template.jinja").write_text(each(TURN))
    assert not up_to_date(work)


def test_named_templates_of_a_tokenizer_are_chosen_by_name(tmp_path):
    folder = write("qwen", tmp_path / "own")
    (folder / "chat_template.jinja").unlink()
    listed = [
        {"name": "default", "template": each(TURN)},
        {
            "name": "ends",
            "template": CHATML + "{% if not add_generation_prompt %}<|im_end|>{% endif %}",
        },
    ]
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": listed}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(chat_encoder(tokenizer, None)(CHAT)[0]).startswith("<user>one</>")
    tokens, learned = chat_encoder(tokenizer, "ends")(CHAT)
    # The end is no part of a turn's beginning, which has the same letters.
    assert tokenizer.decode(tokens[learned]) == "two<|im_end|>\nnaïve two<|im_end|>\n<|im_end|>"
    with pytest.raises(
        InputError, match=r"there is none such; .*, or one of chatml, plain, default, ends"
    ):
        chat_encoder(tokenizer, "none")


@pytest.mark.parametrize("form", ["qwen", "gpt2", "llama3", "llama2.model"])
def test_a_conversation_ends_once_and_its_end_is_learned(form, tmp_path):
    folder = write(form, tmp_path / "own")
    tokenizer = load_tokenizer(str(folder))
    _, tokens, learned = corpus_of(tmp_path, folder)
    whole = chat_encoder(tokenizer, None)(CHAT)[0].tolist()
    added = [tokenizer.end_token] if form == "gpt2" else []
    assert tokens.tolist() == [*whole, *added]
    assert learned[len(tokens) - 1 - tokens[::-1].tolist().index(tokenizer.end_token)]
