"""What a seeded fault is."""

from dataclasses import dataclass
from pathlib import Path


class StaleFaultError(Exception):
    """A fault whose text is not in its file exactly once."""


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `file`.

    file: path from the root of the tree. old: found there exactly once.
    caught_by: the test file (or `file::test`) that is to notice; it is run before all others.
    """

    name: str
    file: str
    old: str
    new: str
    caught_by: str

    def apply(self, tree: Path) -> None:
        """Seed the fault into a copy of the tree. Raises StaleFaultError where its text is not found exactly once."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        found = text.count(self.old)
        if found != 1 or self.new == self.old:
            raise StaleFaultError(f"its text is found {found} times in {self.file}; change it with the code")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
