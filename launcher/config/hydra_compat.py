"""Hydra's private names, and its loader over several folders, of which the first wins.

Hydra's own `--config-dir` only adds what the application lacks. Here a copy of `conf/` with one
edited file must take effect, so the user's folders go first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePosixPath

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from launcher.config.errors import ConfigError
from launcher.config.sources import refuse_unusable

__all__ = ["BasicSweeper", "Hydra", "composed", "get_args_parser", "searching"]

# Hydra makes its plugins without arguments: `_UserFolders` takes its folders from here.
_user_folders: ContextVar[tuple[Path, ...]] = ContextVar("user_folders", default=())


class _UserFolder(FileConfigSource):
    """A user's folder, from which no defaults list leads to another folder."""

    @staticmethod
    def scheme() -> str:
        return "user"

    def is_config(self, config_path: str) -> bool:
        # The first folder to be asked, so that the file that is merged is the one that is checked.
        path = PurePosixPath(config_path)
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                f"A defaults list names {config_path}, which is in no folder of settings",
                "Name a file below the folder itself: /GROUP/FILE, without '..'.",
            )
        return super().is_config(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        refuse_unusable(Path(self.path, self._normalize_file_name(config_path)))
        return super().load_config(config_path)


class _UserFolders(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in reversed(_user_folders.get()):
            path = f"{_UserFolder.scheme()}://{folder}"
            search_path.prepend("user", path, SearchPathQuery(provider="main"))
        search_path.append("launcher", f"file://{Path(__file__).with_name('optuna')}")


@contextmanager
def searching(folders: Sequence[Path]) -> Iterator[ConfigLoader]:
    """Have Hydra read `folders`, the last of which is the project's, inside the block.

    Blocks may be nested: a sweeper composes nothing while its points are composed.
    """
    *users, own = folders
    Plugins.instance().register(_UserFolders)
    Plugins.instance().register(_UserFolder)
    token = _user_folders.set(tuple(users))
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(own), job_name="launcher", version_base="1.3"):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = outer
        _user_folders.reset(token)


class _ExposingLoader(ConfigLoaderImpl):
    """Config loader that exposes the resolved defaults list before merging.

    Hydra's own `compute_defaults_list` would resolve it a second time, a third of the time that
    composing takes.
    """

    def __init__(self, loader: ConfigLoader, look: Callable[[Sequence[ResultDefault]], None]):
        super().__init__(loader.get_search_path())
        self._look = look

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        self._look(defaults)
        return super()._compose_config_from_defaults_list(defaults, repo)


def composed(
    loader: ConfigLoader,
    primary: str,
    overrides: Sequence[str],
    look: Callable[[Sequence[ResultDefault]], None],
) -> DictConfig:
    """Return the settings that Hydra composes inside `searching`, without Hydra's own section.

    Args:
        loader: the loader of `searching`.
        primary: the name of the file to begin with.
        overrides: the command line as Hydra is to see it.
        look: called with the files that will be merged, in order; it may raise.
    """
    found = _ExposingLoader(loader, look).load_configuration(
        primary, list(overrides), RunMode.RUN, from_shell=False
    )
    with open_dict(found):
        del found["hydra"]
    return found
