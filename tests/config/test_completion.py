"""What a shell offers to complete, in each shell that is here, on a terminal and by the key."""

import fcntl
import os
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.cli import hydra_flags

STARTS = {
    "bash": ["--norc", "--noprofile", "-i"],
    "zsh": ["-f", "-i"],
    "fish": ["--no-config", "-i"],
}
SOURCED = {"fish": "launcher -sc install=fish | source"}


@pytest.mark.parametrize("shell", STARTS)
def test_a_shell_is_told_how_to_complete_and_how_to_forget(shell, capfd):
    for what in ("install", "uninstall"):
        assert main(["-sc", f"{what}={shell}"]) == 0
        assert "_launcher_completion" in capfd.readouterr().out


@pytest.mark.devices
@pytest.mark.sampled(6, rest="slow")
@pytest.mark.parametrize("command", ["launcher", "python -m launcher"])
@pytest.mark.parametrize("shell", STARTS)
def test_a_shell_completes_what_is_typed(shell, command, tmp_path):
    """On a terminal, by the key."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    for name, words in {"launcher": "-m launcher ", "python": ""}.items():
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}"$@"\n')
        program.chmod(0o755)
    environ = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HOME": str(tmp_path),
        "TERM": "dumb",
        "PS1": "> ",
    }
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    said = SOURCED.get(shell, f'eval "$(launcher -sc install={shell})"')
    with subprocess.Popen(
        [shell, *STARTS[shell]],
        cwd=tmp_path,
        env=environ,
        pass_fds=[slave],
        preexec_fn=lambda: os.login_tty(slave),
    ) as process:
        try:
            os.write(master, f"{said}; echo re''ady\n".encode())
            until(master, "ready")
            os.write(master, f"echo {command} model=ml".encode()[5:] + b"\t")
            until(master, "model=mlp")
            os.write(master, b" recipe=smo\t")
            until(master, "recipe=smoke")
        finally:
            process.kill()
            os.close(slave)
            os.close(master)


@pytest.mark.devices  # starts a process
def test_a_star_that_is_typed_is_no_glob(tmp_path):
    (tmp_path / "launcher").write_text('#!/bin/sh\necho "$COMP_LINE" > asked\necho "x=* x=b y=c"\n')
    (tmp_path / "launcher").chmod(0o755)
    (tmp_path / "x=file").touch()
    line = "launcher a=* * x="
    install = Path(hydra_flags.__file__).with_name("completion.bash").read_text()
    script = (
        f"{install}\n"
        f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDBREAKS=' '\n"
        '_launcher_completion\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc"], input=script, cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (tmp_path / "asked").read_text() == f"{line}\n"
    assert done.stdout.splitlines() == ["x=*", "x=b"], done.stderr


def until(terminal, text):
    """Read what a shell writes until the text is there."""
    read, deadline = "", time.monotonic() + 100
    while text not in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", read):
        assert time.monotonic() < deadline, read
        if select.select([terminal], [], [], 1)[0]:
            read += os.read(terminal, 1 << 16).decode(errors="replace")
