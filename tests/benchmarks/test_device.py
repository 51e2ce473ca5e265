"""`shippo bench --device cuda`: refused without a GPU, and exercised in Triton's interpreter."""

import pytest
import torch

from benchmarks.device import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match=r"`device` is 'cuda'.*no GPU here; run it on a machine with one"):
        main(False, None)


def test_candidates_are_checked_before_they_are_timed(interpreter):
    records = interpreter.ask("bench")
    assert set(records) == {"shippo triton", "shippo chunked"}
    for record in records.values():
        assert record["status"] == "ok"
        assert max(record["errors"]["both"].values()) <= 2e-5
        assert record["forward"]["median"] > 0
        assert record["both"]["over_roof"] > 0
