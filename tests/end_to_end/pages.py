"""The pages of this project, and what stands in them: commands, programs, files, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; `output` is the `text` block right below it, None where there is none."""

    language: str
    text: str
    output: str | None = None

    @property
    def lines(self) -> list[str]:
        """The lines, each joined with those that continue it."""
        return re.sub(r"\\\n\s*", "", self.text).splitlines()


@dataclass(frozen=True)
class Page:
    """A Markdown file, `name` from the checkout's root."""

    name: str
    text: str

    @property
    def blocks(self) -> list[Block]:
        """The fenced blocks in order, but for those that are another's output."""
        found: list[Block] = []
        end = -1
        for match in _FENCED.finditer(self.text):
            language, text = match[2], match[3]
            if language == "text" and found and not self.text[end : match.start()].strip():
                found[-1] = Block(found[-1].language, found[-1].text, text)
            else:
                found.append(Block(language, text))
            end = match.end()
        return found

    def of(self, language: str) -> list[Block]:
        """The blocks of one language."""
        return [block for block in self.blocks if block.language == language]

    @property
    def commands(self) -> list[str]:
        """The lines of shell blocks, and the commands with arguments in the text and its tables."""
        lines = [line.strip() for block in self.of("sh") for line in block.lines]
        return lines + re.findall(r"`((?:time )?python -m launcher[.\w]* [^`\n]+)`", self.text)

    @property
    def programs(self) -> list[list[Block]]:
        """The Python blocks; one that does not begin with an import continues the one before."""
        found: list[list[Block]] = []
        for block in self.of("python"):
            if block.text.startswith(("import ", "from ")):
                found.append([])
            found[-1].append(block)
        return found

    @property
    def links(self) -> list[str]:
        """The targets of links and pictures inside this project."""
        targets = re.findall(r"\]\(([^)\s]+)\)", self.text)
        return [target for target in targets if "://" not in target]

    @property
    def headings(self) -> set[str]:
        """What a link may point to in here, as GitHub names it."""
        titles = re.findall(r"^#+ (.*)$", self.text, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def read_page(name: str) -> Page:
    """The page in this file, named from the checkout's root."""
    return Page(name, (ROOT / name).read_text(encoding="utf-8"))


def read_pages() -> list[Page]:
    """All pages: the README of every room, how a program uses it, and how to contribute."""
    rooms = [
        "",
        "conf/",
        "launcher/",
        "launcher/*/",
        "recipes/",
        "recipes/*/",
        "slurm/",
        "tests/",
        "tests/*/",
    ]
    paths = [path for room in rooms for path in sorted(ROOT.glob(f"{room}README.md"))]
    own = [path for path in paths if not path.parent.is_symlink()]  # launcher/conf is conf/
    own += [ROOT / ".github" / name for name in ("AGENTS.md", "CONTRIBUTING.md")]
    return [read_page(str(path.relative_to(ROOT))) for path in own]
