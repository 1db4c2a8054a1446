"""Multi-head attention of the poly-encoder's head, against torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.models.attention import MultiHead


def made(width, heads, seed):
    """Ours with random weights, and torch's with the same."""
    torch.manual_seed(seed)
    ours = MultiHead(width, heads)
    theirs = torch.nn.MultiheadAttention(width, heads, batch_first=True).double()
    with torch.no_grad():
        for layer in (ours.q, ours.k, ours.v, ours.o):
            torch.nn.init.normal_(layer.bias)
        parts = (ours.q, ours.k, ours.v)
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        theirs.out_proj.weight.copy_(ours.o.weight)
        theirs.out_proj.bias.copy_(ours.o.bias)
    return ours, theirs


@st.composite
def cases(draw):
    heads, share, batch, keys, queries = (draw(st.integers(1, most)) for most in (4, 4, 3, 7, 5))
    lengths = draw(st.lists(st.integers(1, keys), min_size=batch, max_size=batch))
    seed = draw(st.integers(0, 2**31))
    ours, theirs = made(heads * share, heads, seed)
    mask = torch.arange(keys) < torch.tensor(lengths)[:, None]
    sizes = [(batch, keys, heads * share), (batch, queries, heads * share)]
    return ours, theirs, *(torch.randn(size) for size in sizes), mask


def oracle(theirs, queries, keys, mask):
    """What the queries see, float64."""
    keys = keys.double()
    return theirs(queries.double(), keys, keys, key_padding_mask=~mask, need_weights=False)[0]


@given(cases())
def test_codes_see_what_torchs_attention_sees(case):
    ours, theirs, keys, queries, mask = case
    with torch.no_grad():
        seen = ours.attend(queries[0], keys, mask)
        expected = oracle(theirs, queries[:1].expand(len(keys), -1, -1), keys, mask)
    torch.testing.assert_close(seen, expected.float(), rtol=1e-4, atol=1e-4)


@given(cases())
def test_score_is_the_candidate_times_what_it_sees(case):
    ours, theirs, vectors, candidates, mask = case
    with torch.no_grad():
        scores = ours.scores(vectors, mask, candidates)
        shared = ours.scores(vectors, mask, candidates[0])
        seen = oracle(theirs, candidates, vectors, mask)
        seen_by_shared = oracle(theirs, candidates[:1].expand_as(candidates), vectors, mask)
    expected = (seen * candidates.double()).sum(dim=2).float()
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-3)
    expected = (seen_by_shared * candidates[0].double()).sum(dim=2).float()
    torch.testing.assert_close(shared, expected, rtol=1e-3, atol=1e-3)


@given(cases(), st.sampled_from([0.0, 1e3]))
def test_masked_keys_change_nothing(case, value):
    ours, _, keys, queries, mask = case
    longer = torch.nn.functional.pad(keys, (0, 0, 0, 2), value=value)
    longer_mask = torch.nn.functional.pad(mask, (0, 2))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.attend(queries[0], longer, longer_mask), ours.attend(queries[0], keys, mask)
        )
        torch.testing.assert_close(
            ours.scores(longer, longer_mask, queries),
            ours.scores(keys, mask, queries),
            rtol=1e-4,
            atol=1e-5,
        )


def test_nothing_to_see_is_still_a_number():
    ours, _ = made(8, 2, 0)
    with torch.no_grad():
        scores = ours.scores(torch.ones(1, 3, 8), torch.zeros(1, 3), torch.ones(2, 8))
    assert scores.isfinite().all()


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(
        BadInput, match="attention_heads: 3 is not allowed; allowed: a divisor of 16"
    ):
        MultiHead(16, 3)
