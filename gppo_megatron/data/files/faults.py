"""What can be wrong with a row, what becomes of such rows, and the report that counts them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gppo_megatron.data.files.readers import Origin

EXCERPT = 60
LONGEST_DETAIL = 240

FAULTS: dict[str, bool] = {
    "malformed_row": True,
    "missing_problem": True,
    "bad_chat": True,
    "unexpected_template": True,
    "template_leftover": True,
    "missing_gold": True,
    "marked_up_gold": True,
    "unverifiable_gold": True,
    "conflicting_golds": True,
    "duplicate": True,
    "broken_unicode": True,
    "swallowed_latex": True,
    "missing_image": True,
    "long_prompt": True,
    "unwritable": True,
    "other_kind": True,
    "overlap": True,
    "near_overlap": False,
    "wrapped_gold": False,
    "guessable_gold": False,
    "unused_tolerance": False,
    "asy_figure": False,
    "invisible_characters": False,
    "carriage_returns": False,
}
"""Name of each fault -> whether its rows are left out; docs/data.md says what each means."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of one row. detail: what was found there."""

    fault: str
    detail: str

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError(f"no such fault: {self.fault!r}")

    @property
    def drops(self) -> bool:
        return FAULTS[self.fault]


class UnusableRowError(Exception):
    """A row from which no problem can be read."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(detail)
        self.finding = Finding(fault, detail)


@dataclass
class Tally:
    """How many rows have a fault, and the first of them."""

    count: int
    origin: Origin
    detail: str


@dataclass
class Report:
    """Rows read, problems kept, and the faults of the others. A row may have several faults, but is left out once."""

    source: str
    rows: int = 0
    kept: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        return self.rows - self.kept

    def add(self, finding: Finding, origin: Origin, count: int = 1) -> None:
        tally = self.tallies.setdefault(finding.fault, Tally(0, origin, finding.detail))
        tally.count += count

    def count(self, fault: str) -> int:
        return self.tallies[fault].count if fault in self.tallies else 0

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.source}: {self.rows:,} rows, {self.kept:,} kept, {self.dropped:,} left out", *self._lines()]
        )

    def _lines(self) -> Iterator[str]:
        """A line a fault, those whose rows are left out first."""
        for fault, drops in FAULTS.items():
            if fault in self.tallies:
                tally = self.tallies[fault]
                fate = "left out" if drops else "kept"
                yield f"  {fault:<21}{tally.count:>9,} {fate:<9} e.g. {tally.origin}: {tally.detail[:LONGEST_DETAIL]}"


def excerpt(text: str) -> str:
    """The beginning of a text as a literal, so that nothing in it can disturb a terminal."""
    return ascii(text[:EXCERPT]) + "..." * (len(text) > EXCERPT)
