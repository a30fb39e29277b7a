"""What a refactoring must leave as it is: plans, programs, instructions, refusals, a training.

A difference that is meant is kept by `python tests/net/remake.py`, and read in its `git diff`.
"""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import doors
import net_steps
from commands import PLANS, REFUSED
from digests import REMAKE, hold, made_with, plain_program, read, rounded, sha, sha_of

REMAKES = bool(os.environ.get(REMAKE))
_COUNTED = re.compile(r"\b(dot|while|all-reduce|reduce-scatter|all-gather|all-to-all)\(")
LEFT_OUT = {"jax_version", "fingerprint"}
SLOW = {
    *("llama 1b scanned, auto", "moe scanned, auto", "gpt 1.3b, zero3", "gpt scanned, manual"),
    *("bert scanned, 3d", "vit scanned, manual", "vit, data", "resnet, data", "unet, zero2"),
}


def planned_digest(plan: dict[str, Any]) -> dict[str, Any]:
    """What is short as it is, and of the rest a hash; what is empty counts in the whole alone."""
    shapes = [f"{len(s['layers'])} layers on {s['logical_mesh']}" for s in plan["stages"]]
    memory = max(stage["memory_bytes"] for stage in plan["stages"])
    found = {"shapes": "; ".join(shapes), "most memory_bytes": memory}
    told = {key: unplaced(value) for key, value in plan.items() if key not in LEFT_OUT}
    for key, value in told.items():
        if isinstance(value, (dict, list)) and value:
            found[f"sha256 {key}"] = sha_of(value)
        elif value:
            found[key] = rounded(value)
    return {**found, "sha256": sha_of(told)}


def unplaced(value: Any) -> Any:
    """A tree without the lines of source files that its words name."""
    if isinstance(value, str):
        return re.sub(r"\S+\.py:\d+(:\d+)?( \(\w+\))?", "LINE", value)
    if isinstance(value, dict):
        return {key: unplaced(one) for key, one in value.items()}
    return [unplaced(one) for one in value] if isinstance(value, list) else value


def marked(names: Any) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize("name", marked(PLANS))
def test_plans(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert doors.main([*PLANS[name].split(), "task=plan", "report=none", "run.id=one"]) == 0
    plan = json.loads((tmp_path / "outputs" / "one" / "plan.json").read_text())
    hold("plans", name, planned_digest(plan))


@pytest.mark.sampled(3, rest="slow")
@pytest.mark.parametrize("name", net_steps.PROGRAMS)
def test_compiled_programs(name: str) -> None:
    with_jax = read("programs")["made_with"]["jax"]
    if not REMAKES and with_jax != jax.__version__:
        pytest.skip(f"the texts are those of JAX {with_jax}, and this is {jax.__version__}")
    step, method, devices, hosts = net_steps.PROGRAMS[name]
    texts = doors.compiled_texts(
        *doors.planned(*net_steps.step_of(step), method, devices, hosts), devices
    )
    plain = {program: plain_program(text) for program, text in texts.items()}
    kinds = collections.Counter(kind for text in plain.values() for kind in _COUNTED.findall(text))
    lines = {f"lines {program}": text.count("\n") for program, text in plain.items()}
    shas = {f"sha256 {program}": sha(text) for program, text in plain.items()}
    hold("programs", name, {**dict(sorted(kinds.items())), **lines, **shas})


@pytest.mark.sampled(3, rest="slow")
@pytest.mark.parametrize("name", net_steps.LISTS)
def test_instructions(name: str) -> None:
    step, method, devices, hosts = net_steps.LISTS[name]
    traced, plan = doors.planned(*net_steps.step_of(step), method, devices, hosts)
    found: dict[str, Any] = {}
    for rank in range(hosts):
        slots, listed = doors.instructions(traced, plan, rank)
        kinds = collections.Counter(line.partition(" ")[0] for line in listed)
        of = f"worker {rank}"
        found |= {f"{of}: {kind}": count for kind, count in sorted(kinds.items())}
        found |= {f"{of}: slots": len(slots), f"{of}: sha256 slots": sha("\n".join(slots))}
        found[f"{of}: sha256 instructions"] = sha("\n".join(listed))
    hold("instructions", name, found)


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """The code, the keys that are named, and that there is a remedy; words are free."""
    monkeypatch.chdir(tmp_path)
    code = doors.main([*words.split(), "report=none"])
    hold("refusals", words, refusal(words, code, capfd.readouterr().err))


def refusal(words: str, code: int, said: str) -> dict[str, Any]:
    lines = [line for line in said.splitlines() if line.startswith("launcher: ")]
    text = " ".join(lines).removeprefix("launcher: ")
    # Where a setting was given: that names files, and ends before the remedy.
    plain = re.sub(r"\([^()]*(?:on the command line|\.yaml:\d+)[^()]*\)", "()", text)
    plain = re.sub(r"(?<![\w.=])\S*/\S*|(?<==)\S+?(?=[.,:;)]*(?:\s|$))", "", plain)
    dotted = re.findall(r"(?<![\w.])[a-z_]+(?:\.[a-z_0-9]+)+", plain)
    groups = re.findall(r"(?<![\w.])[a-z_]+(?==)", plain)
    own = [word.partition("=")[0] for word in words.split()]
    own = [name for name in own if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.])", plain)]
    named = sorted({*dotted, *groups, *own} - {"key"})
    remedy = "must be" in plain or re.search(r"\. \S+ \S+", plain) is not None
    return {"code": code, "lines": len(lines), "keys": named, "remedy": remedy}


@pytest.mark.slow
def test_a_training(tmp_path: Path) -> None:
    """The losses of `recipe=smoke`, to six digits: its text is this Python's standard library."""
    kept = read("training")["made_with"]
    if not REMAKES and kept != made_with():
        pytest.skip(f"its text is that of Python {kept['python']} with JAX {kept['jax']}")
    words = "recipe=smoke", "report=none", "run.id=one"
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "outputs" / "one" / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line) for line in lines]
    hold("training", "smoke", {str(n): rounded(timeless(x), 6) for n, x in enumerate(measured)})


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    """A line of `metrics.jsonl` without what the clock or the machine says."""
    clocks = "seconds", "per_second", "time", "mfu", "tflops", "memory", "bytes", "bubble"
    return {k: v for k, v in line.items() if not any(word in k for word in clocks)}
