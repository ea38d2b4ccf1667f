"""The variance argument holds where it is measured, and the parameter counts are those of arithmetic."""

import json

import numpy as np
import pytest

from harness import scaling
from impls.spec import AttentionConfig


@pytest.fixture(scope="module", params=[0, 1, 2])
def sizes(request: pytest.FixtureRequest) -> list[dict]:
    return scaling.measure(request.param)["head_sizes"]


def test_is_plain_json_and_deterministic() -> None:
    assert json.loads(json.dumps(scaling.measure(), allow_nan=False)) == scaling.measure()


def test_variance(sizes: list[dict]) -> None:
    assert [each["d_k"] for each in sizes] == [16, 32, 64, 128, 256, 512, 1024]
    for each in sizes:
        for name, expected in (("unscaled", each["d_k"]), ("scaled", 1)):  # 3.3, 3.4
            got = each[name]
            assert abs(got["mean"]) < 5 * got["mean_standard_error"]
            assert abs(got["variance"] - expected) < 5 * got["variance_standard_error"] < expected / 2


def test_unscaled_softmax_saturates(sizes: list[dict]) -> None:
    small, large = sizes[0], sizes[-1]
    assert large["scaled"]["entropy_bits"] > 5  # of 6
    assert large["unscaled"]["entropy_bits"] < 0.5 < small["unscaled"]["entropy_bits"]
    assert large["unscaled"]["jacobian_norm"] < 0.6 * large["scaled"]["jacobian_norm"]  # 3.8
    assert large["unscaled"]["jacobian_norm_median"] < 0.1 * large["scaled"]["jacobian_norm_median"]
    for name in ("entropy_bits", "jacobian_norm"):  # with scaling, the head's size makes no difference
        assert np.ptp([each["scaled"][name] for each in sizes]) < 0.1 * small["scaled"][name]


def test_spread_of_known_rows() -> None:
    uniform, certain = np.zeros((3, 4)), np.array([[1e4, 0, 0, 0]] * 3)
    assert scaling.spread(uniform)["entropy_bits"] == 2
    assert scaling.spread(uniform)["jacobian_norm"] == pytest.approx(np.sqrt(3) / 4)  # J = (I - 1/4) / 4
    assert scaling.spread(certain)["entropy_bits"] == 0 and scaling.spread(certain)["jacobian_norm"] == 0


def test_parameters() -> None:
    qwen = scaling.parameters(AttentionConfig(1024, 16, 8, 128, 1e-6))
    assert qwen["many_heads"] == qwen["one_wide_head"] == 4 * 1024 * 2048
    assert qwen["grouped_query"] == 3 * 1024 * 2048 and qwen["norm_weights"] == 256
    plain = scaling.parameters(AttentionConfig(24, 6, 6, 10, 1e-6))
    assert plain["many_heads"] == plain["one_wide_head"] == plain["grouped_query"] == 4 * 24 * 60


def test_the_triangle_lets_keys_be_cached() -> None:
    """Twelve tokens: 66 answers before a changed one, 78 from it on."""
    found = scaling.caching()
    assert json.loads(json.dumps(found, allow_nan=False)) == found == scaling.caching()
    assert (found["earlier"], found["earlier_moved"], found["earlier_moved_unmasked"]) == (66, 0, 66)
    assert found["later_moved"] == 78 and found["apart"] < 1e-14
