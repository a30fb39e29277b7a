"""What tests of disturbed runs share."""

import fcntl
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launched import train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs that are left alone, by their settings; each is made once for all processes of tests."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def run(*words: str) -> Path:
        name = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]
        folder = shared / f"undisturbed-{name}"
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                folder.mkdir()
                train(folder, *words)
        return folder / "outputs" / "one"

    return run
