"""300 cases of the fuzz (`python -m tests.fuzz` runs 10,000 of more kinds), and whether the fuzz can fail."""

import json

import numpy as np
import pytest

from tests import fuzz


@pytest.mark.parametrize("part", range(6))
def test_scan_and_cell_agree_with_the_oracle(part):
    result = fuzz.fuzz(seed=1, cases=range(50 * part, 50 * part + 50), signatures=3)
    assert not result["failures"], json.dumps(result["failures"], indent=1)


def test_every_kind_is_drawn():
    cases = [fuzz.draw(1, number, 3) for number in range(300)]
    for name, kinds in {
        "backend": fuzz.BACKENDS,
        "threads": fuzz.THREADS,
        "regime": fuzz.REGIMES,
        "dtype": fuzz.TOLERANCE,
    }.items():
        assert {getattr(case, name) for case in cases} == set(kinds), name
    assert any(case.operands["read"].shape[2] < case.operands["value"].shape[2] for case in cases)
    assert any(case.cu_seqlens is not None for case in cases)
    assert any(case.mask is not None for case in cases)


def test_the_gradients_of_the_oracle_are_difference_quotients():
    case = next(case for case in (fuzz.draw(2, number, 2) for number in range(2000)) if small(case))
    gradients, random = fuzz.oracle(case), np.random.default_rng(0)
    for group, name in [(case.operands, name) for name in case.operands] + [(case.state, name) for name in case.state]:
        array = group[name]
        direction = random.standard_normal(array.shape)
        sides = []
        for sign in (1, -1):
            group[name] = array + sign * 1e-6 * direction
            moved = fuzz.oracle(case)
            outputs = {"y": moved["y"]} | {key: moved[f"final {key}"] for key in case.state}
            sides.append(sum((case.cotangents[key] * output).sum() for key, output in outputs.items()))
        group[name] = array
        gradient = gradients[f"gradient of {'initial ' if group is case.state else ''}{name}"]
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx((gradient * direction).sum(), rel=1e-5), name


def small(case):
    shape = case.operands["value"].shape
    return (
        case.call == "cell"
        and case.dtype == "float64"
        and case.regime == "contracting"
        and case.has_state
        and shape[1] in (3, 8)
    )


@pytest.mark.parametrize("name", ["y", "final memory", "gradient of right"])
def test_a_wrong_number_is_found(name):
    case = fuzz.draw(1, 9, 1)
    expected = fuzz.oracle(case)
    assert fuzz.compare(case, expected, expected) == (dict.fromkeys(expected, 0.0), [])
    got = {key: array.copy() for key, array in expected.items()}
    got[name].flat[0] += 1e-2
    assert any(complaint.startswith(name) for complaint in fuzz.compare(case, got, expected)[1])
    got[name].flat[0] = np.nan
    assert any(complaint.startswith(name) for complaint in fuzz.compare(case, got, expected)[1])
