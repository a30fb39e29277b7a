"""Tables that may be wider than the terminal: what does not fit stands in a further table below.

No header is folded and no column is dropped, from 40 columns on. Used by `sweep`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from launcher.report.console import plain_table

_BETWEEN = 2  # blanks between columns
_LONGEST_CELL = 40  # longer ones are folded


class Column(NamedTuple):
    """A column by its header and its cells, one a row."""

    header: str
    cells: Sequence[Text]
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """How wide it is."""
        longest = max((cell_len(cell.plain) for cell in self.cells), default=0)
        return max(cell_len(self.header), min(longest, _LONGEST_CELL))


def side_by_side(columns: Sequence[Column], width: int) -> Iterator[Table]:
    """The columns in as few tables as are no wider than `width`; each begins with the first column,
    which names the rows."""
    first, *others = columns
    while True:
        shown, left = [first], width - first.width
        while others and (len(shown) == 1 or others[0].width + _BETWEEN <= left):
            shown.append(others.pop(0))
            left -= shown[-1].width + _BETWEEN
        yield _table(shown)
        if not others:
            return


def _table(columns: Sequence[Column]) -> Table:
    table = plain_table()
    for column in columns:
        table.add_column(column.header, justify=column.justify, overflow="fold", width=column.width)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table
