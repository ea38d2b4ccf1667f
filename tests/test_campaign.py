"""No false alarm: correct runs keep every limit. A sample in `make test`; `make campaign` runs the whole."""

import pytest
from campaign import FULL, REDUCED, REGIMES, Stratum, strata, tally

HARDER = ("peaked", "outliers")
SAMPLE = [Stratum(1000 + i, REDUCED[1 + i], regime, ("float16", "bfloat16")[i % 2]) for i, regime in enumerate(HARDER)]


@pytest.mark.parametrize("job", [*SAMPLE, FULL[0]], ids=lambda job: getattr(job, "regime", "probes"))
def test_no_correct_run_is_blamed(job, capsys):
    found = tally(job)
    with capsys.disabled():
        print(f"\n{found.summary().splitlines()[0]} at most {max(each.value for each in found.largest.values()):.2f}")
    assert not found.alarms, found.alarms[:5]


def test_campaign_covers_what_it_says():
    """1,000 runs and more, of every shape with every kind of weights, and 20 seeds at the full geometry."""
    jobs = strata()
    assert {(job.shape, job.regime) for job in jobs} >= {(shape, regime) for shape in REDUCED for regime in REGIMES}
    assert sum(job.shape in FULL for job in jobs) == 20 and len(set(jobs)) == 220
    assert {job.shape.B for job in jobs} == {1, 2, 3, 4} and {1, 512} <= {job.shape.T for job in jobs}
    assert {(job.regime, job.short) for job in jobs} >= {(each, short) for each in REGIMES for short in ("bfloat16",)}
