"""The build gate's samples leave out no pair of properties."""

from __future__ import annotations

import itertools

from tests.sampling import covering

ALL = [
    each
    for each in itertools.product(
        ("layer_norm", "softmax"), ("half", "float", "double"), ("warp", "block"), range(4)
    )
    if each[:3] != ("softmax", "double", "warp")  # what cannot be
]


def pairs(found):
    return {pair for each in found for pair in itertools.combinations(enumerate(each), 2)}


def test_any_two_properties_that_meet_among_all_candidates_meet_in_the_sample():
    found = covering(ALL, lambda each: each, lambda each: each[3])

    assert pairs(found) == pairs(ALL)
    assert len(found) < len(ALL) / 2


def test_of_candidates_with_the_same_properties_the_one_under_most_strain_is_taken():
    found = covering(ALL, lambda each: each[:2], lambda each: each[3])

    assert sorted(each[:2] for each in found) == sorted({each[:2] for each in ALL})
    assert {each[3] for each in found} == {3}
