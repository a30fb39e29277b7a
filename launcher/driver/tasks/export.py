"""`task=export`: write the weights of a run's checkpoint for other programs.

They go to one `.npz` file, or to a folder as Hugging Face's `transformers` reads it.
"""

from __future__ import annotations

from pathlib import Path

from launcher import checkpoint
from launcher.base import DamagedError
from launcher.checkpoint.hugging_face import Folder
from launcher.config.errors import ConfigError
from launcher.config.optimizer import Lora
from launcher.config.schema import Config
from launcher.driver.folder.make_folder import private_files
from launcher.driver.tasks.task import CheckpointTask, new_path
from launcher.inference.export_tokenizer import exported_tokenizer
from launcher.inference.stored_model import run_settings
from launcher.recipes.data.masking import with_mask_token
from launcher.recipes.models.hugging_face import family_named
from launcher.report.console import RunConsole, status


class ExportTask(CheckpointTask):
    """Write the weights of a run's checkpoint for other programs."""

    name, verb = "export", "be exported"

    def use(self, config: Config, console: RunConsole, source: Path, home: Path) -> int:
        """Write the model of the checkpoint.

        Raises:
            ConfigError: there is no such checkpoint, its model has no such format, or what is to be
                written cannot be made where it is wanted.
            OSError: it cannot be written.
        """
        target = _target(config, home, source)
        private, earlier = not config.run.shared, target.exists()
        theirs = _theirs(config, home) if config.export.format == "hf" else None
        with private_files(config.run), status(console, f"writing {target}"):
            is_there = (home / "config.yaml").exists()
            lora = run_settings(config, home).optimizer.lora if is_there else Lora()
            model = checkpoint.FinishedModel(source, lora, config.export.ema)
            if theirs is None:
                count = checkpoint.write_flat(target, model.whole(), private)
            else:
                dtype = config.export.dtype
                count = checkpoint.export_hugging_face(
                    model, target, theirs, dtype=dtype, private=private
                )
        instead = ", in place of an earlier export" if earlier else ""
        console.print(f"{count} arrays of {source} are in {target}{instead}", soft_wrap=True)
        return 0


def _theirs(config: Config, home: Path) -> Folder:
    """Return the content of the Hugging Face folder of a run's model.

    Raises:
        ConfigError: `transformers` has no such model.
    """
    settings = run_settings(config, home)
    options = settings.model
    family = family_named(options.name)
    try:
        if family is None:
            raise DamagedError(f"model={options.name} has no form there")
        tokenizer = exported_tokenizer(settings)
        options = with_mask_token(options, tokenizer.mask_token)
        described, tensors = family.config_of(options), list(family.tensors(options))
    except DamagedError as error:
        raise ConfigError(
            f"export.format=hf is not for this run: {error}", "Use export.format=npz."
        ) from None
    return Folder({**described, **tokenizer.special}, tensors, tokenizer.files)


def _target(config: Config, home: Path, source: Path) -> Path:
    """Return the file or folder to write, a new one, or the run's own file."""
    is_folder = config.export.format == "hf"
    if config.export.path is None and not is_folder:
        return home / f"weights-{source.name}.npz"
    named = config.export.path or str(home / f"hf-{source.name}")
    return new_path("export.path", named, "folder" if is_folder else "file")
