"""What tests of disturbed runs share."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from disturbed import SLOW, WORDS
from launched import Launcher


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A run that is left alone, by its number of hosts; made when it is first asked for."""

    @functools.cache
    def run(hosts: int) -> Path:
        folder = tmp_path_factory.mktemp(f"hosts_{hosts}")
        code, _, err = Launcher(folder, *WORDS, *SLOW, f"cluster.hosts={hosts}").end()
        assert code == 0, err
        return folder / "outputs" / "one"

    return run
