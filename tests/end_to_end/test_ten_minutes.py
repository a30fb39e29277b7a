"""The five commands of the first page, as a new user types them: a tuned model in ten minutes.

It downloads packages, torch among them, into an environment of its own, and wants 6 GB of disk:

pytest -n 0 -m stress tests/end_to_end/test_ten_minutes.py -s
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pages import ROOT, read_page

pytestmark = [pytest.mark.stress]

# The user's files: a folder of random weights, 10 million of them, and a file of documents.
MAKE = """
import json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

texts = [f"number {i} comes before number {i + 1}" for i in range(2000)]
with open("talks.jsonl", "w") as file:
    file.writelines(json.dumps({"text": text}) + "\\n" for text in texts)
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
special = ["<s>", "</s>"]
made.train_from_iterator(
    texts, trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=letters)
)
PreTrainedTokenizerFast(
    tokenizer_object=made, bos_token="<s>", eos_token="</s>"
).save_pretrained("my_llama")
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
    bos_token_id=0, eos_token_id=1,
))
assert 9.5e6 < model.num_parameters() < 10.5e6
model.save_pretrained("my_llama")
"""


def test_five_commands_lead_to_a_tuned_model(tmp_path: Path) -> None:
    checkout = tmp_path / "launcher"
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, files.split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name, follow_symlinks=False)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),  # nothing compiled or measured before
        "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path("~/.cache/pip").expanduser())),
    }
    for name in ("XLA_FLAGS", "PYTHONPATH", "JAX_COMPILATION_CACHE_DIR"):
        environ.pop(name, None)

    def run(command: str) -> tuple[str, float]:
        begun = time.monotonic()
        done = subprocess.run(
            command, shell=True, cwd=checkout, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout, time.monotonic() - begun

    (block,) = (b for b in read_page("README.md").of("sh") if "recipe=finetune_hf" in b.text)
    commands = block.lines
    assert len(commands) == 5
    times = [run(commands[0])[1]]
    (tmp_path / "make.py").write_text(MAKE)
    run(f"python {tmp_path / 'make.py'}")
    for command in commands[1:]:
        said, seconds = run(command)
        times.append(seconds)
    print(*(f"{t:.0f} s" for t in times), f"= {sum(times):.0f} s")
    assert "generated_text" in said  # the model talks
    summary = json.loads((checkout / "outputs" / "tuned" / "summary.json").read_text())
    assert summary["steps"] == 20
    assert summary["final_loss"] < 7  # of ln 4096 = 8.3 at the start
    check = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; import torch\n"
        "model, words = M.from_pretrained('tuned_llama'), T.from_pretrained('tuned_llama')\n"
        "tokens = torch.tensor([words('number 7 comes before number 8').input_ids])\n"
        "print(model(tokens, labels=tokens).loss.item())"
    )
    (tmp_path / "check.py").write_text(check)
    assert float(run(f"python {tmp_path / 'check.py'}")[0]) < 7  # what was learned is there
