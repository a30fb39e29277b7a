"""`masking.py`: by which token tokens are hidden, from data to `transformers` and back."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from launcher.config.compose import load, to_dict
from launcher.config.errors import ConfigError
from launcher.driver.tasks.export import _theirs
from launcher.inference.export_tokenizer import exported_tokenizer
from launcher.recipes import build_dataset
from launcher.recipes.data.masking import masked
from launcher.recipes.datasets.documents.prepare import prepare_corpus
from launcher.recipes.models.bert import BERTOptions

BERT = "model=bert", "model.vocab_size=300", "model.sequence_length=8", "train.eval_every=0"
JSONL = "dataset=jsonl", "dataset.path=talks.jsonl", "dataset.validation_fraction=0"
MASK = {"a": 258, "b": 256}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Documents as tokens by two tokenizers that differ in the number of `[MASK]`, and by bytes."""
    home = tmp_path_factory.mktemp("prepared")
    lines = (json.dumps({"text": f"number {i}"}) for i in range(20))
    (home / "talks.jsonl").write_text("\n".join(lines))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    for name, mask in MASK.items():
        made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        before = ["</s>", "<pad>"][: mask - 256]
        made.add_special_tokens([AddedToken(token) for token in [*before, "[MASK]"]])
        (home / name).mkdir()
        made.save(str(home / name / "tokenizer.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name in (*MASK, "bytes"):
            prepare_corpus(load([*BERT, *data_of(name)]).dataset, 1)
    return home


@pytest.fixture(autouse=True)
def folder(prepared, tmp_path, monkeypatch):
    """A copy of what is prepared, where the test stands."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def data_of(tokenizer):
    return *JSONL, f"dataset.tokenizer={tokenizer}", f"dataset.tokens={tokenizer}.tokens"


def tokens_of(name):
    return "dataset=tokens", f"dataset.path={name}.tokens", "dataset.validation_fraction=0"


def mixture_of(name):
    parts = f"{{x: {{path: {name}.tokens}}, y: {{path: {name}.tokens}}}}"
    return "dataset=mixture", f"dataset.parts={parts}", "dataset.validation_fraction=0"


@pytest.mark.parametrize(
    ("words", "mask"),
    [
        (data_of("a"), 258),
        (tokens_of("b"), 256),
        (mixture_of("a"), 258),
        (data_of("bytes"), 299),  # which has none: the last one
        ((*data_of("a"), "model.mask_token=7"), 7),
        ((*mixture_of("a"), "model.mask_token=0"), 0),
        (("dataset=synthetic", "model.mask_token=7"), 7),
    ],
)
def test_the_mask_is_the_models_or_the_tokenizers_or_the_last_token(words, mask):
    config = load([*BERT, *words])
    batch = build_dataset(config.dataset, config.model, 4, seed=0).train(0)
    assert (batch["weights"].sum(-1) == 1).all()
    assert (batch["tokens"][batch["weights"] > 0] == mask).all()


def test_a_mask_that_is_no_token_is_refused():
    with pytest.raises(ConfigError) as error:
        load([*BERT, "dataset=synthetic", "model.mask_token=300"])
    assert str(error.value).startswith(
        "model.mask_token=300 is not in the vocabulary: tokens are below model.vocab_size=300"
    )


def test_an_export_says_the_mask_and_a_model_from_there_has_it(tmp_path):
    for words, mask in ((data_of("a"), 258), ((*data_of("a"), "model.mask_token=7"), 7)):
        config = load([*BERT, *words, "run.id=mine"])
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
        folder = _theirs(config, tmp_path)
        assert folder.config["mask_token_id"] == mask
        (tmp_path / "config.json").write_text(json.dumps(folder.config))
        from_there = ("model=bert", "model.size=hf:.", "dataset=synthetic")
        again = load([*from_there]).model
        assert again.mask_token == mask
        (tmp_path / "config.json").unlink()
        assert again.filled() == again  # as a run that resumes fills them
        assert dataclasses.replace(again, mask_token=None).filled().mask_token is None
    settings = exported_tokenizer(config).files["tokenizer_config.json"]
    assert json.loads(settings)["mask_token"] == "[MASK]"


def test_a_samples_mask_is_its_own_whichever_rows_it_is_made_with():
    model = BERTOptions(vocab_size=50, sequence_length=32, mask_every=4)

    def texts(which):
        return {"tokens": np.asarray(which)[:, None] + np.zeros((1, 32), np.int32)}

    gather = masked(model, texts, 49)
    together, alone = gather(np.array([3, 7])), gather(np.array([7]))
    for name, rows in together.items():
        np.testing.assert_array_equal(rows[1:], alone[name])
    assert (together["weights"][0] != together["weights"][1]).any()
