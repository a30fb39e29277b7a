"""Small tokenizers of the forms that people have, and what `transformers` makes of them.

Vocabularies are written by hand, so that no training may change them. `python tokenizer_forms.py`,
where `transformers` and sentencepiece are installed, writes `transformers_tokens.json` anew.
"""

import json
import struct
import tempfile
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

PINNED = Path(__file__).with_name("transformers_tokens.json")
TEXTS = ["one two", " two  ones", "naïve\n\n", "<s>one</s>two", "one<|im_end|>\n"]
WORDS = ["on", "one", "tw", "two", "ones"]
SAID = {"one": "user", "two": "assistant", "ones": "user", "naïve two": "assistant"}
CHAT = [{"role": role, "content": text} for text, role in SAID.items()]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + "
    "' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TAGGED = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '</s>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CUT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
S = ["<unk>", "<s>", "</s>"]
ENDS = {
    "bos_token": {"__type": "AddedToken", "content": "<s>"},
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
ASKED = {"add_bos_token": True, "add_eos_token": True}


def vocabulary(special, letters, space="▁"):
    """Names by their numbers, and merges that join each word from the left."""
    merges = {}
    for word in [*WORDS, *(space + word for word in WORDS)]:
        merges |= {(word[: end - 1], word[end - 1]): word[:end] for end in range(2, len(word) + 1)}
    names = dict.fromkeys([*special, *letters, *merges.values(), *f"{space}onetwsnaïve"])
    return {name: number for number, name in enumerate(names)}, list(merges)


def made(model, special, post, **parts):
    """A tokenizer of these parts; `post` is the template of a text."""
    found = Tokenizer(model)
    for name, part in parts.items():
        setattr(found, name, part)
    found.add_special_tokens(special)
    if post:
        numbers = [(name, found.token_to_id(name)) for name in special if name in post]
        found.post_processor = processors.TemplateProcessing(single=post, special_tokens=numbers)
    return found


def byte_level(special, post=None, regex=None, **parts):
    names, merges = vocabulary([], sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ")
    steps = [pre_tokenizers.Split(Regex(regex), "isolated")] if regex else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not regex))
    parts |= {"pre_tokenizer": pre_tokenizers.Sequence(steps), "decoder": decoders.ByteLevel()}
    return made(models.BPE(names, merges), special, post, **parts)


def byte_fallback(special, post, *normal, **parts):
    model = models.BPE(
        *vocabulary(special, FALLBACK), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    parts["normalizer"] = normalizers.Sequence([*normal, normalizers.Replace(" ", "▁")])
    return made(model, special, post, **parts)


def word_pieces(special, post):
    letters = sorted({*"onetwsnaive<>/|_md"})
    names = [*special, *letters, *(f"##{letter}" for letter in letters), "one", "##s"]
    model = models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]")
    low, words = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    return made(model, special, post, normalizer=low, pre_tokenizer=words)


def unigram(special, post):
    names, _ = vocabulary(special, "</>|_imd")
    model = models.Unigram([(name, -float(number)) for name, number in names.items()], 2)
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    return made(model, special, post, pre_tokenizer=pre_tokenizers.Sequence(words))


def varint(value):
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + varint(value >> 7)


def field(number, value):
    """Protocol Buffers' encoding of a numbered field: an integer, a float, or bytes."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def message(*fields):
    return b"".join(field(*one) for one in fields)


def sentencepiece(kind, prefix, squeeze=False, users=()):
    """A sentencepiece model of `kind`, 1 a Unigram and 2 a BPE (`sentencepiece_model.proto`)."""
    names, _ = vocabulary(S, [*users, *FALLBACK])
    kinds = dict.fromkeys(users, 4) | dict.fromkeys(FALLBACK, 6) | {"<unk>": 2, "<s>": 3, "</s>": 3}
    pieces = [
        (1, message((1, name.encode()), (2, -float(number)), (3, kinds.get(name, 1))))
        for name, number in names.items()
    ]
    trainer = message((3, kind), (35, 1), (40, 0), (41, 1), (42, 2))
    return message(*pieces, (2, trainer), (3, message((3, prefix), (4, squeeze), (5, True))))


# Of each: its class, the tokenizer, other settings, and its chat template.
FORMS = {
    "gpt2": ("GPT2", byte_level(["<|endoftext|>"]), {"eos_token": "<|endoftext|>"}, CHATML),
    "llama3": (
        "PreTrained", byte_level(["<begin>", "<|eot_id|>"], "<begin> $A", CUT),
        {"bos_token": {"__type": "AddedToken", "content": "<begin>"}, "eos_token": "<|eot_id|>"},
        "{{ bos_token }}" + CHATML.replace("<|im_end|>\n", "<|eot_id|>"),
    ),
    "qwen": (
        "Qwen2", byte_level(["<|im_start|>", "<|im_end|>"], "", CUT, normalizer=normalizers.NFC()),
        {"eos_token": "<|im_end|>", "add_bos_token": False}, CHATML,
    ),
    "gemma": (
        "Gemma",
        byte_fallback(["<pad>", "<eos>", "<bos>", "<unk>"], "<bos> $A",
                      pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous")),
        {"bos_token": "<bos>", "eos_token": "<eos>"}, "{{ bos_token }}" + CHATML,
    ),
    "llama2": (
        "Llama", byte_fallback(S, "<s> $A", normalizers.Prepend("▁")), ENDS | {"legacy": True}, INST
    ),
    "llama2_new": ("Llama", byte_fallback(S, "<s> $A", normalizers.Prepend("▁")), ENDS, INST),
    "bert": (
        "Bert", word_pieces(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "[CLS] $A [SEP]"),
        {"mask_token": "[MASK]"}, CHATML,
    ),
    "t5": (
        "T5", unigram(["<pad>", "</s>", "<unk>"], "$A </s>"), {"eos_token": "</s>", "extra_ids": 0},
        CHATML,
    ),
    # Tokens that the settings alone name.
    "named": (
        "PreTrained", byte_level(["<|endoftext|>"]),
        {"eos_token": "<|im_end|>", "pad_token": "<pad>",
         "added_tokens_decoder": {"400": {"content": "<|im_start|>", "special": True}}}, CHATML,
    ),
    "llama2.model": ("Llama", sentencepiece(2, False), ENDS | {"add_bos_token": True}, INST),
    "unigram.model": ("", sentencepiece(1, True, True), {"add_eos_token": True}, INST),
    "users.model": ("PreTrained", sentencepiece(2, False, False, ["\n\n", "▁▁"]), ASKED, INST),
}  # fmt: skip


def write(form, folder):
    """Write a form's files into a new folder."""
    of, found, settings, template = FORMS[form]
    folder.mkdir()
    if isinstance(found, bytes):
        (folder / "tokenizer.model").write_bytes(found)
    else:
        found.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": f"{of}Tokenizer{'Fast' * (of == 'PreTrained')}"} if of else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def theirs(form, folder):
    """What `transformers` makes of the texts and of the chat, and its mask by generation tags."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(str(write(form, folder)))
    masked = {"return_assistant_tokens_mask": True, "return_dict": True}
    tagged = found.apply_chat_template(CHAT, chat_template=TAGGED, **masked)
    return {
        "texts": [found(text)["input_ids"] for text in TEXTS],
        "chat": found.apply_chat_template(CHAT, return_dict=False),
        "mask": [tagged["input_ids"], tagged["assistant_masks"]],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        every = {form: theirs(form, Path(root, form)) for form in FORMS}
    PINNED.write_text(json.dumps(every, separators=(",", ":")).replace('},"', '},\n"') + "\n")
