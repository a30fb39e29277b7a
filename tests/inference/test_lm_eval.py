"""`launcher/inference/lm_eval.py`: what lm-eval is told is what the model computes.

pip install lm-eval
pytest -m stress tests/inference/test_lm_eval.py
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import transformers_reference
from test_hugging_face import random_params, write

from launcher.recipes.data.corpus.tokenizer_files import tokenizer_files
from launcher.recipes.models.llama import LlamaOptions

pytestmark = [pytest.mark.devices, pytest.mark.stress]

TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def model(tmp_path):
    """A folder with a model of bytes."""
    options = LlamaOptions(
        size=None, vocab_size=257, sequence_length=64, num_layers=2, num_heads=4, num_kv_heads=2,
        hidden_size=32, mlp_size=48,
    ).filled()  # fmt: skip
    write(options, random_params(options), tmp_path / "model")
    for name, content in tokenizer_files("bytes").files.items():
        (tmp_path / "model" / name).write_bytes(content)
    return tmp_path / "model"


def test_likelihoods_and_texts_are_those_of_the_logits(model):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from launcher.inference.lm_eval import LanguageModel

    def reference(text, start):
        tokens = np.array([[256, *text.encode()]])
        logits = transformers_reference.logits(model, tokens)[0]
        scores = np.log(transformers_reference.softmax(logits))
        places = range(start, len(text))
        value = sum(scores[i, tokens[0, i + 1]] for i in places)
        return value, all(logits[i].argmax() == tokens[0, i + 1] for i in places)

    found = LanguageModel(str(model), batch_size=2)

    def asked(kind, *arguments):
        requests = [Instance(kind, {}, args, n) for n, args in enumerate(arguments)]
        return getattr(found, kind)(requests)

    text = asked("generate_until", ("", {"until": ["\0never"], "max_gen_toks": 4}))[0]
    pairs = [("", "one two"), ("", text[:1]), ("", "x")]
    for (_, words), (value, greedy) in zip(pairs, asked("loglikelihood", *pairs), strict=True):
        expected = reference(words, 0)
        assert value == pytest.approx(expected[0], abs=1e-3)
        assert greedy == expected[1]
    # After a context nothing stands before it.
    tokens = np.array([list(b"one two")])
    scores = np.log(transformers_reference.softmax(transformers_reference.logits(model, tokens)[0]))
    [(value, _)] = asked("loglikelihood", ("one", " two"))
    assert asked("loglikelihood", ("one ", "two")) == [(value, _)]
    wanted = sum(scores[i, tokens[0, i + 1]] for i in range(2, 6))
    assert value == pytest.approx(wanted, abs=1e-3)
    [rolled] = asked("loglikelihood_rolling", ("one two",))
    assert rolled == pytest.approx(reference("one two", 0)[0], abs=1e-3)
    [long] = asked("loglikelihood_rolling", ("a" * 100,))
    assert np.isfinite(long)
    assert long < rolled


def test_lm_eval_runs_a_task(model, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    from launcher.inference.lm_eval import LanguageModel

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    rows = [{"question": f"{i}?", "choices": ["yes", "no"], "answer": i % 2} for i in range(6)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "capitals.yaml").write_text(TASK.replace("DATA", str(data)))
    found = LanguageModel(str(model))
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    results = lm_eval.simple_evaluate(model=found, tasks=["capitals"], task_manager=manager)
    from lm_eval.api.instance import Instance

    def likelihood(question, choice):
        return found.loglikelihood([Instance("loglikelihood", {}, (question, choice), 0)])[0][0]

    right = [
        int(np.argmax([likelihood(row["question"], " " + c) for c in row["choices"]]))
        == row["answer"]
        for row in rows
    ]
    assert results["results"]["capitals"]["acc,none"] == pytest.approx(np.mean(right))
