"""Log-probabilities and ranks of given tokens and of the best ids at their places.

    logprob(id) = logits[id] - highest - log(sum over all ids of exp(logits - highest))
    rank(id) = how many ids score at least as high as it

The logits are the model's own, before anything is adjusted. Ranks meet twice: for the highest score, the mass, the
token's own score and everyone's best ids; then, as only now all know what to compare with, for the counts. Every rank
comes to the same numbers.
"""

from __future__ import annotations

import torch

from ..backend import Backend
from ..parallel import TensorParallelGroup
from . import candidates, keys

_LOWEST = torch.finfo(torch.float32).min


class Logprobs:
    """Shapes: vocab_rows_of_rank has the vocabulary ids of every rank, in rank order, together [0, vocab_size)."""

    def __init__(
        self,
        vocab_rows_of_rank: tuple[range, ...],
        parallel: TensorParallelGroup,
        backend: Backend,
    ) -> None:
        self._parallel = parallel
        self._backend = backend
        self._rows = vocab_rows_of_rank[parallel.rank]
        self._vocab_size = sum(map(len, vocab_rows_of_rank))

    def of(self, logits: torch.Tensor, token_ids: torch.Tensor, num_best: int) -> torch.Tensor:
        """Score a token for each row. Every rank calls it with the same tokens; waits for nothing on a device.

        Shapes: logits [n, vocabulary rows of this rank], any float dtype, left as they are; token_ids [n] integer, on
            the same device. Returns [3, n, 1 + num_best] int32, num_best being vocab_size if there are no more ids:
            ids, the bits of float32 log-probabilities, and ranks; the row's token first, then the best, ties by id.
            NaN where the logits were.
        """
        num_best = min(num_best, self._vocab_size)
        logits = logits.float()
        first, num_here = self._rows.start, len(self._rows)
        places = token_ids.long() - first
        is_here = (places >= 0) & (places < num_here)
        own = logits.gather(1, places.clamp(0, num_here - 1).unsqueeze(1)).squeeze(1)
        own = own.masked_fill(~is_here, float("-inf"))
        highest = logits.amax(dim=1).clamp_(min=_LOWEST)  # all of a rank's may be -inf
        mass = self._mass(logits, highest)
        offer = (self._best(logits, num_best), _words(own), _words(highest), _words(mass))
        gathered = self._parallel.all_gather(torch.cat(offer, dim=1).contiguous())
        found, own, highest, masses = gathered.split([num_best, 1, 1, 1], dim=2)
        own, highest = _floats(own).amax(dim=0).float(), _floats(highest).float()
        relative = (highest.double() - highest.double().amax(dim=0)).exp()
        total = (_floats(masses) * relative).sum(dim=0)
        together = found.transpose(0, 1).reshape(len(logits), -1)
        best = together.topk(num_best, dim=1).values if num_best else together
        scores = torch.cat((own.unsqueeze(1), keys.scores_of(best)), dim=1)
        wide = scores.double() - highest.amax(dim=0).double().unsqueeze(1)
        logprobs = (wide - total.log().unsqueeze(1)).float()
        # -inf travels no further: an id that cannot come is as unlikely as float32 can say.
        logprobs = logprobs.clamp(min=_LOWEST)
        ids = torch.cat((token_ids.long().unsqueeze(1), keys.ids_of(best)), dim=1)
        ranks = self._ranks(logits, scores)
        return torch.stack((ids.int(), logprobs.view(torch.int32), ranks.int()))

    def _mass(self, logits: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
        """The sum of exp(logit - highest) of each row on this rank: [n] float64."""
        out = torch.empty(len(logits), dtype=torch.float64, device=logits.device)
        rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        above = torch.full_like(out, candidates.NO_CANDIDATE, dtype=torch.int64)  # all ids
        self._backend.softmax_mass(logits, rows, highest, above, out=out)
        return out

    def _best(self, logits: torch.Tensor, num_best: int) -> torch.Tensor:
        """The keys of each row's best ids on this rank: [n, num_best] int64, NO_CANDIDATE where there are no more."""
        if not num_best:
            return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
        find = best_keys if logits.is_cuda else candidates.best_candidates
        return find(logits, num_best, self._rows.start)

    def _ranks(self, logits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Count the ids that score at least as high. Shapes: scores [n, 1 + num_best], best first from column 1 on.

        Of the best, only those that tie with the last may have equals that are not among them: two thresholds do.
        """
        best = scores[:, 1:]
        ends = torch.stack((scores[:, 0], scores[:, -1]), dim=1)
        counts = torch.stack([(logits >= end.unsqueeze(1)).sum(dim=1) for end in ends.unbind(1)])
        counts = self._parallel.all_gather(counts).sum(dim=0)
        among = (best.unsqueeze(1) >= best.unsqueeze(2)).sum(dim=2)
        of_best = torch.where(best == ends[:, 1:], counts[1].unsqueeze(1), among)
        return torch.cat((counts[0].unsqueeze(1), of_best), dim=1)


def best_keys(logits: torch.Tensor, width: int, first_id: int) -> torch.Tensor:
    """What `candidates.best_candidates` gives: three times slower on a CPU, but it never waits for a device."""
    num_ids = logits.shape[1]
    taken = min(width, num_ids)
    ids = torch.arange(first_id, first_id + num_ids, device=logits.device)
    found = keys.pack(logits, ids).topk(taken, dim=1).values
    return torch.nn.functional.pad(found, (0, width - taken), value=candidates.NO_CANDIDATE)


def _words(values: torch.Tensor) -> torch.Tensor:
    """[n] floats as [n, 1] int64 words: what ranks exchange has one dtype."""
    return values.double().view(torch.int64).unsqueeze(1)


def _floats(words: torch.Tensor) -> torch.Tensor:
    """[world_size, n, 1] words as [world_size, n] float64."""
    return words.squeeze(2).contiguous().view(torch.float64)
