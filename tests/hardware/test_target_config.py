"""All kinds of GPU in `conf/device/`: what each can do, and what its compiler is told of it."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from launcher.base import CONF
from launcher.hardware.datasheets import COMPILER_KEYS, datasheets, described_sheet, has_bf16
from launcher.hardware.target_config import target_config
from launcher.plan import local_shape
from launcher.recipes.models.attention import with_attention
from launcher.recipes.models.gpt import GPTOptions

KINDS = {
    # compute capability, bytes of shared memory that a block can have, bf16, fused attention
    "A100-SXM4-80GB": (8.0, 166912, True, True),
    "A100-SXM4-40GB": (8.0, 166912, True, True),
    "A100-PCIe-80GB": (8.0, 166912, True, True),
    "B200-SXM-180GB": (10.0, 232448, True, True),
    "GB200-HBM3e-186GB": (10.0, 232448, True, True),
    "GH200-HBM3-96GB": (9.0, 232448, True, True),
    "GH200-HBM3e-144GB": (9.0, 232448, True, True),
    "H100-SXM5-80GB": (9.0, 232448, True, True),
    "H20-SXM5-96GB": (9.0, 232448, True, True),
    "H200-SXM-141GB": (9.0, 232448, True, True),
    "H800-SXM5-80GB": (9.0, 232448, True, True),
    "L40S-PCIe-48GB": (8.9, 101376, True, True),
    "RTX-4090-24GB": (8.9, 101376, True, True),
    "T4-PCIe-16GB": (7.5, 65536, False, False),
    "V100-SXM2-16GB": (7.0, 98304, False, False),
    "V100-SXM2-32GB": (7.0, 98304, False, False),
}
GPT = {
    "vocab_size": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "sequence_length": 16,
}  # fmt: skip
SHEETS = {sheet.name: sheet for sheet in datasheets()}
READ = """
import json, sys
from jax.experimental.topologies import get_topology_desc
read = {}
for name, text in json.load(sys.stdin).items():
    found = get_topology_desc("", "cuda", target_config=text, topology="1x2x4").devices
    read[name] = len(found), found[0].device_kind, float(found[0].compute_capability)
print(json.dumps(read))
"""


def test_each_kind_is_in_the_table():
    assert SHEETS.keys() == KINDS.keys()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_can_do_what_its_compute_capability_says(name):
    sheet, (capability, shared, bf16, fused) = SHEETS[name], KINDS[name]
    assert sheet.compute_capability == capability
    assert f"shared_memory_per_block_optin: {shared}\n" in target_config(sheet)
    chosen = with_attention(GPTOptions(**GPT).filled(), "bf16", capability).attention
    assert chosen == ("cudnn" if fused else "xla")
    shape = local_shape(8, 1, name)
    assert (shape.compute_capability, has_bf16(capability)) == (capability, bf16)
    peak = sheet.peak_flops if bf16 else sheet.peak_flops_fp32
    assert shape.flops == sheet.sustained * peak
    assert shape.attention_flops == sheet.sustained_attention * peak


@pytest.mark.devices
def test_xla_takes_each_kind():
    why = "XLA's compiler for GPUs is not here: pip install '.[plan-cuda]'"
    pytest.importorskip("jax_plugins.xla_cuda12", reason=why)
    texts = {name: target_config(sheet) for name, sheet in SHEETS.items()}
    ended = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps(texts),
        env={**os.environ, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        name: [8, name, capability] for name, (capability, *_) in KINDS.items()
    }


@pytest.mark.parametrize("key", COMPILER_KEYS)
def test_what_a_datasheet_lacks_is_named(key, tmp_path, monkeypatch):
    """When programs are to be compiled; until then nothing lacks it."""
    (tmp_path / "device").mkdir()
    lines = (CONF / "device" / "h100.yaml").read_text().splitlines()
    kept = "\n".join(line for line in lines if not line.startswith(f"  {key}:"))
    (tmp_path / "device" / "x.yaml").write_text(kept)
    monkeypatch.setattr("launcher.hardware.datasheets.CONF", tmp_path)
    (sheet,) = datasheets.__wrapped__()
    with pytest.raises(ValueError, match=rf"conf/device/x.yaml: device.{key} is not set"):
        target_config(sheet)


def test_a_described_gpu_of_a_known_name_has_its_kinds_figures_but_for_those_it_says():
    device = {"name": "A100-40GB", "peak_tflops": 312.0, "sustained": 0.5, "memory_gib": 40}
    device |= {"sustained_attention": 0.5, "launch_us": 15.0}
    device |= {"memory_gb_per_second": 1555} | dict.fromkeys(COMPILER_KEYS) | {"clock_ghz": 1.2}
    links = {"intra_host_gb_per_second": 25.0}
    sheet = described_sheet(device, links, "cluster=mine")
    assert (sheet.compute_capability, sheet.multiprocessors, sheet.clock_ghz) == (8.0, 108, 1.2)
    assert "core_count: 108" in target_config(sheet)
    unknown = described_sheet(device | {"name": "Mine"}, links, "cluster=mine")
    with pytest.raises(ValueError, match=r"cluster=mine: device.compute_capability is not set"):
        target_config(unknown)


def test_an_unknown_compute_capability_is_named():
    sheet = dataclasses.replace(SHEETS["H100-SXM5-80GB"], compute_capability=5.2)
    with pytest.raises(ValueError, match=r"h100.yaml: device.compute_capability=5.2 .* 7.0, 7.5"):
        target_config(sheet)
