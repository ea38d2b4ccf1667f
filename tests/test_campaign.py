"""No false alarm: correct runs keep every limit. A sample in `make test`; `make campaign` runs the whole."""

import itertools

import pytest
from campaign import FULL, REDUCED, shares, summary


def hold(runs, capsys):
    """Run them all; say how much of each limit was used; none may be above 1."""
    found = [share for seed, shape in runs for share in shares(seed, shape)]
    with capsys.disabled():
        print(f"\n{len(found):,} checks in {4 * len(runs)} cases (seed, shape, input, RoPE); the largest shares:")
        print(summary(found))
    alarms = [share for share in found if not share.value <= 1]
    assert not alarms, alarms[:5]


def test_sample_of_reduced_width(capsys):
    hold(list(zip(range(1000, 1005), REDUCED[1:6], strict=True)), capsys)


@pytest.mark.campaign
@pytest.mark.parametrize("shape", REDUCED, ids=lambda shape: "-".join(map(str, shape)))
def test_200_seeds_at_reduced_width(shape, capsys):
    first = 20 * REDUCED.index(shape)
    hold([(seed, shape) for seed in range(first, first + 20)], capsys)


@pytest.mark.campaign
def test_20_seeds_at_full_geometry(capsys):
    hold(list(itertools.islice(zip(range(20), itertools.cycle(FULL), strict=False), 20)), capsys)
