"""Cases in which every two parameters meet with all of their values, in place of all combinations."""

import itertools

import pytest


def pairs(*levels):
    """Combinations of a level of each factor. Every two levels of two factors are together in one of them."""
    counts = [range(len(of)) for of in levels]
    both = itertools.combinations(enumerate(counts), 2)
    missing = dict.fromkeys(((i, x), (j, y)) for (i, of_i), (j, of_j) in both for x in of_i for y in of_j)
    while missing:
        row = dict(next(iter(missing)))
        for factor in range(len(levels)):
            if factor not in row:
                row[factor] = max(counts[factor], key=lambda level: len(missing.keys() & _met(row | {factor: level})))
        for pair in _met(row):
            missing.pop(pair, None)
        yield tuple(of[row[factor]] for factor, of in enumerate(levels))


def _met(row):
    """The pairs of levels in a row of levels by factor."""
    return set(itertools.combinations(sorted(row.items()), 2))


def parametrize(**levels):
    """Marks a test that has a case for each of the combinations."""
    return pytest.mark.parametrize(list(levels), list(pairs(*levels.values())), ids=lambda x: getattr(x, "__name__", str(x)))
