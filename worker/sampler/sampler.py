"""Logits of this rank's part of the vocabulary -> one token a row, the same on every rank.

Order, per row: what it asks to be adjusted (`adjustments.py`); then greedily the highest, or temperature, min-p, top-k,
top-p, Gumbel noise and the highest. Every rank offers its best candidates, one all-gather makes all offers known, and
each rank decides from the same numbers. Where the candidates cannot settle a row (top-p of a flat distribution, a large
k, a small min-p), that row's logits are gathered whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..backend import Backend
from ..parallel import TensorParallelGroup
from . import candidates, keys, min_p, noise, redraw, temperature, top_k, top_p
from .adjustments import Adjustments
from .exchange import Offer, exchange
from .host_copy import HostCopy

NAN_SCORES = (
    "the model computed NaN instead of scores; its weights are damaged (download them again), or the dtype is too "
    "narrow for them (use bfloat16 or float32)"
)

# Candidates a rank offers for a row with top-p or min-p alone; how many it takes is known only afterwards.
TOP_P_CANDIDATES = 128
# Candidates a rank offers at most. A row of larger k is gathered whole.
MAX_CANDIDATES = 256
# When a row is gathered whole: how many ids are sorted at first, before all of them are.
_WHOLE_ROW_CANDIDATES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """What is asked of each row that samples. All NumPy, [num_sampling], in the order of the logits' rows.

    positions: the sampled token's own position. seeds: in [0, 2**63).
    """

    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int32, 0 keeps all
    top_p: np.ndarray  # float32
    min_p: np.ndarray  # float32, 0 keeps all
    seeds: np.ndarray  # int64
    positions: np.ndarray  # integer

    def __getitem__(self, chosen: np.ndarray) -> SamplingRows:
        """Some of the rows; chosen is an index array."""
        return SamplingRows(
            temperature=self.temperature[chosen],
            top_k=self.top_k[chosen],
            top_p=self.top_p[chosen],
            min_p=self.min_p[chosen],
            seeds=self.seeds[chosen],
            positions=self.positions[chosen],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """tokens [num_sampling] int32; digests: 8 bytes a rank, in rank order, little-endian, as each gave it."""

    tokens: np.ndarray
    digests: bytes


class Choice:
    """Tokens that are chosen on the device: the next step can use them before the host has seen them.

    Shapes: tokens [num_sampling] int32, on the logits' device.
    """

    def __init__(self, digests: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self._num_ranks = len(digests)
        self._best = best
        self._words = HostCopy(torch.cat((digests, best, tokens.long())))

    def ready(self) -> bool:
        """Whether `fetch` would return at once."""
        return self._words.ready()

    def fetch(self) -> Sampled:
        """Wait until the tokens are here.

        Raises: RuntimeError if the scores were NaN.
        """
        digests, best, tokens = torch.from_numpy(self._words.fetch()).split(
            [self._num_ranks, len(self._best), len(self.tokens)]
        )
        _refuse_nan(best)
        return Sampled(
            tokens=tokens.to(torch.int32).numpy(),
            digests=digests.numpy().astype("<i8", copy=False).tobytes(),
        )


class Sampler:
    """Shapes: vocab_rows_of_rank has the vocabulary ids of every rank, in rank order, together [0, vocab_size)."""

    def __init__(
        self,
        vocab_rows_of_rank: tuple[range, ...],
        parallel: TensorParallelGroup,
        backend: Backend,
    ) -> None:
        assert len(vocab_rows_of_rank) == parallel.world_size, vocab_rows_of_rank
        self._parallel = parallel
        self._backend = backend
        self._sizes = [len(rows) for rows in vocab_rows_of_rank]
        self._vocab_size = sum(self._sizes)
        self._rows = vocab_rows_of_rank[parallel.rank]

    def sample(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        adjustments: Adjustments | None = None,
        *,
        digest: int = 0,
    ) -> Sampled:
        """`choose`, and wait for the outcome."""
        return self.choose(logits, rows, adjustments, digest=digest).fetch()

    def choose(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        adjustments: Adjustments | None = None,
        *,
        digest: int = 0,
    ) -> Choice:
        """Choose. Every rank calls it with the same rows; digest, in [0, 2**64), may differ and comes back from each.

        Waits for the device only where a row has a filter (top-k, top-p, min-p).
        Shapes: logits [num_sampling, vocabulary rows of this rank], any float dtype; left as they are, but for rows
            that are adjusted.
        """
        logits = logits.float()
        if adjustments is not None:
            logits = logits.contiguous()
            adjustments.apply(logits, self._rows, self._vocab_size)
        is_greedy = temperature.is_greedy(rows.temperature) | (rows.top_k == 1)
        is_free = (
            top_k.is_off(rows.top_k, self._vocab_size)
            & top_p.is_off(rows.top_p)
            & min_p.is_off(rows.min_p)
        )
        filtered = np.flatnonzero(~is_greedy & ~is_free)
        single = np.flatnonzero(is_greedy | is_free)
        best = self._best_of_single(logits, rows, single, is_greedy[single])
        if not len(filtered):
            empty = torch.empty(0, dtype=torch.int64, device=logits.device)
            offers = exchange(
                Offer(digest=digest, best=best, found=empty.view(0, 0), masses=empty.double()),
                self._parallel,
            )
            highest = offers.best.amax(dim=0)
            return Choice(offers.digests, highest, keys.ids_of(highest).to(torch.int32))

        filter_ = _Filter(rows[filtered], self._vocab_size, logits.device, self._backend)
        scores = temperature.scaled(_take(logits, filtered), filter_.temperature)
        width = filter_.width
        found = candidates.best_candidates(scores, width, self._rows.start)
        masses = filter_.masses(scores, keys.scores_of(found.amax(dim=1)))
        offers = exchange(
            Offer(digest=digest, best=best, found=found, masses=masses), self._parallel
        )

        tokens = np.empty(len(logits), np.int32)
        if len(single):
            tokens[single] = _ids_of_best(offers.best)
        _refuse_nan(offers.found)
        sizes = torch.tensor(self._sizes, device=logits.device)
        ordered, certain = candidates.merge(offers.found, sizes)
        total = top_p.total_mass(offers.masses, keys.scores_of(offers.found.amax(dim=2)))
        chosen, settled = filter_.choose(ordered, certain, total)
        tokens[filtered] = chosen.cpu().numpy()
        open_rows = np.flatnonzero(~settled.cpu().numpy())
        if len(open_rows):
            tokens[filtered[open_rows]] = self._choose_whole(
                _take(scores, open_rows), filter_, total, open_rows
            )
        device_tokens = torch.from_numpy(tokens).to(logits.device)
        return Choice(offers.digests, offers.best.new_empty(0), device_tokens)

    def _best_of_single(
        self, logits: torch.Tensor, rows: SamplingRows, single: np.ndarray, is_greedy: np.ndarray
    ) -> torch.Tensor:
        """The best key on this rank of each row that needs no candidates: [len(single)] int64."""
        asked = rows[single]
        out = torch.empty(len(single), dtype=torch.int64, device=logits.device)
        self._backend.gumbel_argmax(
            logits,
            _index(single.astype(np.int32), logits),
            _index(np.where(is_greedy, np.float32(0), asked.temperature), logits),
            _index(noise.streams(asked.seeds, asked.positions), logits),
            first_id=self._rows.start,
            out=out,
        )
        return out

    def _choose_whole(
        self, scores: torch.Tensor, filter_: _Filter, total: torch.Tensor, open_rows: np.ndarray
    ) -> np.ndarray:
        """Gather some rows' scores from all ranks, and choose from as many candidates as it takes."""
        longest = max(self._sizes)
        padded = torch.nn.functional.pad(scores, (0, longest - scores.shape[1]))
        gathered = self._parallel.all_gather(padded.contiguous())
        whole = torch.cat(
            [part[:, :size] for part, size in zip(gathered, self._sizes, strict=True)], dim=1
        )
        tokens = np.empty(len(open_rows), np.int32)
        drawn, settled = filter_.only(open_rows).redraw(whole, _take(total, open_rows))
        tokens[:] = drawn.cpu().numpy()
        left = np.flatnonzero(~settled.cpu().numpy())
        if not len(left):
            return tokens
        for width in (min(_WHOLE_ROW_CANDIDATES, self._vocab_size), self._vocab_size):
            found = candidates.best_candidates(_take(whole, left), width, 0)
            ordered = found.sort(dim=1, descending=True).values
            part = filter_.only(open_rows[left])
            certain = torch.full((len(left),), width, device=scores.device)
            chosen, settled = part.choose(ordered, certain, _take(total, open_rows[left]))
            tokens[left] = chosen.cpu().numpy()
            left = left[~settled.cpu().numpy()]
            if not len(left):
                break
        return tokens


class _Filter:
    """Min-p, top-k and top-p of some rows, on candidates in order."""

    def __init__(
        self, rows: SamplingRows, vocab_size: int, device: torch.device, backend: Backend
    ) -> None:
        self._asked = rows
        self._backend = backend
        self._vocab_size = vocab_size
        no_k = top_k.is_off(rows.top_k, vocab_size)
        wanted = np.where(no_k, min(TOP_P_CANDIDATES, vocab_size), rows.top_k)
        self.width = int(min(wanted.max(), MAX_CANDIDATES))
        self._without_k = np.flatnonzero(no_k)
        self._with_p_alone = np.flatnonzero(no_k & min_p.is_off(rows.min_p))
        self.temperature = torch.from_numpy(rows.temperature).to(device)
        self._top_k = torch.from_numpy(np.where(no_k, vocab_size, rows.top_k).astype(np.int64)).to(
            device
        )
        self._no_k = torch.from_numpy(no_k).to(device)
        self._min_p = torch.from_numpy(rows.min_p).to(device)
        self._no_min_p = torch.from_numpy(min_p.is_off(rows.min_p)).to(device)
        self._top_p = torch.from_numpy(rows.top_p).to(device)
        self._no_p = torch.from_numpy(top_p.is_off(rows.top_p)).to(device)
        self._stream = torch.from_numpy(noise.streams(rows.seeds, rows.positions)).to(device)

    def only(self, chosen: np.ndarray) -> _Filter:
        return _Filter(self._asked[chosen], self._vocab_size, self._top_k.device, self._backend)

    def masses(self, scores: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
        """What this rank's ids add to the softmax's denominator, relative to its own highest score.

        0 where nothing of this rank's part may be chosen, and where nobody asks: for all rows but those of top-p alone.
        Shapes: scores [n, num_ids], highest [n] float32; returns [n] float64.
        """
        out = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
        if len(self._with_p_alone):
            rows = _index(self._with_p_alone, scores)
            found = torch.empty(len(rows), dtype=torch.float64, device=scores.device)
            self._backend.softmax_mass(
                scores,
                rows.to(torch.int32),
                highest[rows].clamp(min=torch.finfo(torch.float32).min),  # all may be -inf
                torch.full_like(rows, candidates.NO_CANDIDATE),
                out=found,
            )
            out[rows] = found
        return out

    def kept(
        self, ordered: torch.Tensor, certain: torch.Tensor, total: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which candidates stay, and for which rows the certain ones settle it.

        Shapes: ordered [n, num_ordered] keys, best first; certain [n], how many of them are known to be the
            vocabulary's best; total [n] float64, the mass of the whole vocabulary, read for rows with top-p alone.
            Returns kept [n, num_ordered] bool, settled [n] bool.
        """
        scores = keys.scores_of(ordered)
        is_certain = top_k.kept(certain, ordered.shape[1])
        lowest = min_p.lowest_kept(scores[:, 0], self._min_p)
        after_min_p = is_certain & (scores >= lowest.unsqueeze(1))
        after_k = after_min_p & top_k.kept(self._top_k, ordered.shape[1])
        # All that these two keep are seen once there are k, or one that min-p drops, or no others.
        seen_all = (certain >= self._top_k) | (after_min_p.sum(dim=1) < certain)
        of_k = (scores.double() - scores[:, :1].double()).exp().masked_fill_(~after_k, 0.0)
        p_alone = self._no_k & self._no_min_p
        total = torch.where(p_alone, total, of_k.sum(dim=1))
        after_p, reached = top_p.kept(scores, after_k, self._top_p, total)
        settled = seen_all | (p_alone & reached & ~self._no_p)
        return torch.where(self._no_p.unsqueeze(1), after_k, after_p), settled

    def redraw(self, whole: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes: whole [n, vocab_size] scores, total [n] as in `kept`; returns tokens, settled as `choose` does."""
        tokens = torch.zeros(len(whole), dtype=torch.int64, device=whole.device)
        settled = torch.zeros(len(whole), dtype=torch.bool, device=whole.device)
        rows = self._without_k
        if len(rows):
            chosen = _index(rows, whole)
            tokens[chosen], settled[chosen] = redraw.choose(
                _take(whole, rows),
                _take(self._stream, rows),
                _take(self._top_p, rows),
                _take(self._min_p, rows),
                _take(total, rows),
                self._backend,
            )
        return tokens, settled

    def choose(
        self, ordered: torch.Tensor, certain: torch.Tensor, total: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes: as `kept`; returns tokens [n] int64 (meaningless where not settled) and settled [n] bool."""
        stays, settled = self.kept(ordered, certain, total)
        ids = keys.ids_of(ordered)
        best = torch.empty_like(self._stream)
        self._backend.gumbel_argmax(
            keys.scores_of(ordered).masked_fill_(~stays, float("-inf")),
            torch.arange(len(ids), dtype=torch.int32, device=ids.device),
            torch.ones(len(ids), device=ids.device),  # the scores are scaled
            self._stream,
            ids=ids,
            out=best,
        )
        return keys.ids_of(best), settled


def _ids_of_best(best: torch.Tensor) -> np.ndarray:
    """Shapes: best [world_size, n] keys; returns [n] int32 ids."""
    highest = best.amax(dim=0).cpu()
    _refuse_nan(highest)
    return keys.ids_of(highest).to(torch.int32).numpy()


def _refuse_nan(found: torch.Tensor) -> None:
    """Raises: RuntimeError if a key's score is NaN. Nothing compares with it: the choice would be id 0, or none."""
    if bool((keys.scores_of(found).isnan() & (found != candidates.NO_CANDIDATE)).any()):
        raise RuntimeError(NAN_SCORES)


def _index(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    # From memory that is not pinned the copy is staged at once: the array may go, and no one waits for the device.
    return torch.from_numpy(rows).to(like.device, non_blocking=True)


def _take(tensor: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Some rows of a tensor, ascending; the tensor itself if that is all of them."""
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, _index(rows, tensor))
