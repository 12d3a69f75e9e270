"""docs/policies.md says what rowcast chose and which test holds it to that: the tests it names must be there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "policies.md"


def test_every_test_that_the_page_names_exists():
    """A renamed test leaves a choice that nothing pins, and a page that says something does."""
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert len(named) > 20
    defined = {
        name
        for file in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)
    }
    assert named - defined == set()


def test_every_choice_names_its_test():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    assert [row for row in rows if "`test_" not in row] == []
