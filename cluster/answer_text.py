"""The text of one answer as its caller may see it: what the tokens say, up to a stop string.

Joins the detokenizer and the search for stop strings. Off the step loop: a front or the embedded engine feeds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduler.extras import LogprobRows
from ..scheduler.front_messages import FinishCode
from ..scheduler.sampling_params import SamplingParams
from .stop_strings import StopStrings
from .text import IncrementalDetokenizer, TextProcessor


class AnswerText:
    """Turns the output tokens of one request into text; belongs to one thread at a time.

    `append` gives what no later token can change: half a character is held, and so is what may be the beginning of a
    stop string, which is less than the longest of them. All pieces together are the same however the tokens came.

    Example: stop "DEFGHIJ", tokens "DEF", "G", "X" -> "", "", "DEFGX".
    Raises: ValueError when there are stop strings and the model has no tokenizer.
    """

    def __init__(self, processor: TextProcessor, prompt_ids: Sequence[int], params: SamplingParams):
        if params.stop and not processor.has_tokenizer:
            raise ValueError(
                f"stop strings are looked for in the text, and {processor.model_dir} has no tokenizer.json; "
                "use stop_token_ids"
            )
        self._params = params
        self._processor = processor
        self._processor = processor
        self._detokenizer = (
            IncrementalDetokenizer(processor, prompt_ids, params.skip_special_tokens)
            if params.detokenize
            else None
        )
        self._stops = StopStrings(params.stop) if params.stop else None
        self._held = ""
        self._num_tokens = 0
        self._over = False
        self.stop_string: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def searches(self) -> bool:
        """Whether any token may end the answer here: then each must be appended as it comes."""
        return self._stops is not None

    def texts_of(self, rows: Sequence[LogprobRows | None]) -> dict[int, str]:
        """The text of each token that log-probabilities name; nothing without detokenization."""
        if self._detokenizer is None or not self._processor.has_tokenizer:
            return {}
        ids = {i for one in rows if one is not None for i in one.token_ids.reshape(-1).tolist()}
        return {token_id: self._processor.token_text(token_id) for token_id in ids}

    def append(self, token_ids: Sequence[int], finish: FinishCode) -> str:
        """The new text after `token_ids`, and with an end what was held too; "" after the end.

        finish: why the request ended with these tokens, if it did. A stop string in them ends it as well:
            `stop_string` is set then. `stop_reason` is that, or the stop id that the caller named.
        """
        if self._over:
            return ""
        self._over = finish is not FinishCode.RUNNING
        if finish is FinishCode.STOP and token_ids:
            last = token_ids[-1]
            self.stop_reason = last if last in self._params.stop_token_ids else None
            if not self._params.include_stop_str_in_output and self._is_end(last):
                token_ids = token_ids[:-1]  # it ended the answer and is no part of what was said
        if self._detokenizer is None:
            return ""
        if self._stops is None:
            return self._detokenizer.append(token_ids, self._over)
        return self._search(self._detokenizer, self._stops, token_ids)

    def _is_end(self, last: int) -> bool:
        """Whether the last token of an answer that stopped is its end, or the last of the form that was asked for."""
        if self._params.structured_outputs is None:
            return True
        return last in self._processor.eos_token_ids or last in self._params.stop_token_ids

    def _search(
        self, detokenizer: IncrementalDetokenizer, stops: StopStrings, token_ids: Sequence[int]
    ) -> str:
        released = ""
        # One at a time: the tokens up to min_tokens must not stop the answer, and those after a stop are no part of it.
        for token_id in token_ids:
            self._num_tokens += 1
            released += self._released(detokenizer.append([token_id], False), stops)
            if self.stop_string is not None:
                return released
        if self._over:
            released += self._released(detokenizer.append([], True), stops)
            if self.stop_string is None:
                released += self._held
        return released

    def _released(self, piece: str, stops: StopStrings) -> str:
        """What of the held text and the new piece may be seen."""
        found = stops.find(piece, counts=self._num_tokens > self._params.min_tokens)
        text = self._held + (piece if found is None else piece[: found[0]])
        if found is not None:
            self._over = True
            self.stop_string = self.stop_reason = found[1]
            include = self._params.include_stop_str_in_output
            return text if include else text.removesuffix(found[1])
        num_released = len(text) - stops.num_begun
        self._held = text[num_released:]
        return text[:num_released]
