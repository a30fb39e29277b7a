"""The engine on a GPU, each part a program of its own: see `parts.py`."""

import pytest

pytestmark = pytest.mark.gpu


def test_donation_and_freeing(program, figure):
    told = program("memory")
    assert told["donated"]
    if told["bytes"][0] is not None:  # CPU devices do not say
        assert max(told["bytes"][2:]) <= told["bytes"][1] * 1.01
    figure(f"bytes in use after each step: {told['bytes'][:4]}")


def test_attention(program, figure, on_gpu):
    """`jax.nn.dot_product_attention` by cuDNN inside a planned step, against XLA's own."""
    told = program("attention", "cudnn" if on_gpu else "xla")
    assert told["apart"] < 2e-2
    figure(
        f"{told['ours']:.2f} ms a step, XLA's {told['xla']:.2f}; losses {told['apart']:.1e} apart"
    )


@pytest.mark.parametrize("way", ["pull", "collective"])
def test_two_processes_share_a_gpu(way, program, figure):
    """Two worker processes on one device. Neither way is for that: NCCL wants a device each."""
    told = program("processes", way, "0", XLA_PYTHON_CLIENT_MEM_FRACTION="0.3")
    if told["problem"]:
        pytest.skip(f"not here: {told['problem'][-120:]}")
    figure(and_losses(told))


def test_two_processes_with_a_gpu_each(program, figure, devices):
    """By collectives, as `cluster.transport=auto` takes them on GPUs: what one process computes."""
    if devices < 2:
        pytest.skip("one GPU")
    told = program("processes", "collective", "0", "1")
    assert not told["problem"]
    figure(and_losses(told))


def and_losses(told):
    """The figure of a pipeline whose losses are those of one process."""
    apart = max(abs(x - y) / y for x, y in zip(told["losses"], told["alone"], strict=True))
    assert apart < 1e-3
    return f"64 MiB in {told['ms']:.1f} ms; losses {apart:.1e} from one process's"


@pytest.mark.parametrize("size", ["125m", "350m"])
def test_against_plain_jit(size, program, figure, on_gpu):
    """The step of a GPT in bf16 beside the same step in plain `jax.jit`."""
    told = program("speed", "nano" if not on_gpu else size)
    if on_gpu:
        assert told["ratio"] <= 1.02
    mfu = f", {told['mfu']:.1%} MFU" if told["mfu"] else ""
    figure(
        f"{told['ours']:.2f} ms, {told['ratio']:.3f} of jit's, {told['tflops']:.1f} TFLOP/s{mfu}"
    )
