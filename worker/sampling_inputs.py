"""What is asked of the rows that sample in a step, gathered out of the request table, in batch order."""

from __future__ import annotations

import numpy as np

from ..scheduler.agreement import StepPlan
from ..scheduler.messages import Mask
from .block_tables import ragged_cells
from .request_states import RequestStates
from .sampler.adjustments import Adjustments, RowFeatures
from .sampler.penalties import Penalties
from .sampler.row_masks import RowMasks
from .sampler.sampler import SamplingRows


def sampling_rows(requests: RequestStates, plan: StepPlan) -> SamplingRows:
    """The numbers that every row has."""
    rows = plan.index_mapping[plan.samples]
    return SamplingRows(
        temperature=requests.temperature[rows],
        top_k=requests.top_k[rows],
        top_p=requests.top_p[rows],
        min_p=requests.min_p[rows],
        seeds=requests.seeds[rows],
        positions=plan.seq_lens[plan.samples],
    )


def needs_tokens(requests: RequestStates) -> bool:
    """Whether some row's adjustments read its outputs, so that all of them must be in the table."""
    return bool(requests.features or requests.penalized)


def adjustments(
    requests: RequestStates, plan: StepPlan, mask: Mask | None = None
) -> Adjustments | None:
    """What few rows ask for beside them; None, and no row is looked at, if nobody asks for anything.

    mask: what the step's masked rows may choose.
    """
    if mask is None and not needs_tokens(requests):
        return None
    rows = plan.index_mapping[plan.samples]
    masks = None
    if mask is not None:
        masks = RowMasks(rows=np.flatnonzero(np.isin(rows, mask.rows)), bits=mask.bits)
    # Who samples has computed all it had: the sampled token's position is the number of its tokens.
    lengths = plan.seq_lens[plan.samples]
    features = []
    for place in np.flatnonzero(requests.feature_checksums[rows]).tolist():
        row = int(rows[place])
        if row not in requests.features:  # asks for log-probabilities alone
            continue
        outputs = requests.token_ids[row, requests.num_prompt_tokens[row] : lengths[place]]
        features.append(RowFeatures(row=place, features=requests.features[row], outputs=outputs))
    penalties = _penalties(requests, rows, lengths) if requests.penalized else None
    if not (features or penalties or masks):
        return None
    return Adjustments(features=features, penalties=penalties, masks=masks)


def _penalties(requests: RequestStates, rows: np.ndarray, lengths: np.ndarray) -> Penalties | None:
    places = np.flatnonzero([row in requests.penalized for row in rows.tolist()])
    if not len(places):
        return None
    rows, lengths = rows[places], lengths[places]
    return Penalties(
        rows=places,
        repetition=requests.repetition_penalty[rows],
        frequency=requests.frequency_penalty[rows],
        presence=requests.presence_penalty[rows],
        lengths=lengths,
        num_prompt_tokens=requests.num_prompt_tokens[rows],
        token_ids=requests.token_ids[ragged_cells(rows, lengths)],
    )
