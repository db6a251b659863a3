"""Tests of the combinations of parameters that other tests have."""

import itertools

import pytest
from covering import pairs


@pytest.mark.parametrize("counts", [(2, 3), (3, 3, 3), (2, 6, 3, 6), (5, 1, 4, 2, 2)], ids=str)
def test_every_two_levels_meet(counts):
    levels = [range(count) for count in counts]
    rows = list(pairs(*levels))
    for i, j in itertools.combinations(range(len(counts)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(levels[i], levels[j]))
    # No array of pairs has fewer rows than the two largest factors have pairs.
    least = max(x * y for x, y in itertools.combinations(counts, 2))
    assert least <= len(rows) <= least + 4
