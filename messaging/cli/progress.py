"""A progress bar on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "")


class _Bar(Progress):
    """Fetches the count before drawing, so that the publishing loop need not update the bar."""

    count: Callable[[], int]

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            self.update(task.id, completed=self.count())
        return super().get_renderables()


@contextlib.contextmanager
def progress(count: Callable[[], int], total: int | None) -> Iterator[None]:
    """Show the number of published messages on stderr while the block runs.

    Args:
        count: returns the number of published messages.
        total: the expected number, or ``None`` if it is unknown.
    """
    columns = (TextColumn("published"), BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn())
    with _Bar(*columns, console=Console(stderr=True, force_terminal=True), redirect_stdout=False) as bar:
        bar.count = count
        bar.add_task("", total=total)
        yield
