"""Stop strings in a text that comes in pieces: where one ends, and how much may be the beginning of one.

Owns the search. What is released or held of the text is for `answer_text.py`.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The strings of one request, and how far the text so far has come in each.

    The string that is complete first is the one that is found, of two that end together the longer: so the answer does
    not depend on how the text was cut into pieces.

    Example: "stop" in "a s", "top" -> None with 1 character that may begin it (num_begun), then (3, "stop").
    Source: Knuth, Morris and Pratt's search, one character at a time.
    """

    def __init__(self, strings: Sequence[str]):
        # The longest first: of those that end together it is seen first.
        self._strings = sorted(strings, key=len, reverse=True)
        self._borders = [_borders(string) for string in self._strings]
        self._first_characters = frozenset(string[0] for string in self._strings)
        # For each string, how many of its first characters the text ends with.
        self._begun = [0] * len(self._strings)

    @property
    def num_begun(self) -> int:
        """How many characters at the text's end may be the beginning of a stop string: fewer than the longest has."""
        return max(self._begun, default=0)

    def find(self, piece: str, *, counts: bool = True) -> tuple[int, str] | None:
        """Go on with a piece: where in it the first stop string ends, and which one; None if none does.

        counts: whether a string that ends here is a stop. If not, it is passed by, and one that overlaps it may follow.
        """
        if not any(self._begun) and self._first_characters.isdisjoint(piece):
            return None  # most pieces, and the loop is what costs
        for index, character in enumerate(piece):
            for which, string in enumerate(self._strings):
                borders, begun = self._borders[which], self._begun[which]
                while begun and string[begun] != character:
                    begun = borders[begun]
                begun += string[begun] == character
                if begun == len(string):
                    if counts:
                        return index + 1, string
                    begun = borders[begun]
                self._begun[which] = begun
        return None


def _borders(string: str) -> list[int]:
    """For each length, how long the longest beginning is that is an end as well, itself left out.

    Example: "aab" -> [0, 0, 1, 0].
    """
    borders = [0, 0]
    for character in string[1:]:
        length = borders[-1]
        while length and string[length] != character:
            length = borders[length]
        borders.append(length + (string[length] == character))
    return borders
