"""Files of a run: written whole or not at all, found in order, refused where they belong to another."""

import os

import pytest
import torch

from shippo_lab.experiments import get
from shippo_lab.harness import store
from shippo_lab.harness.progress import Display
from shippo_lab.harness.runner import run


def test_files_keep_tensors_and_meta(tmp_path):
    path = tmp_path / "a" / "unit.pt"
    assert store.load_checkpoint(path) is None
    tensors, meta = {"flat": torch.randn(2, 3)}, {"step": 4, "curves": {"nmse": [[0.1, 1e-17]]}}
    store.save_checkpoint(path, tensors, meta)
    loaded, found = store.load_checkpoint(path) or ({}, {})
    assert torch.equal(loaded["flat"], tensors["flat"])
    assert found == meta
    assert [file.name for file in path.parent.iterdir()] == ["unit.pt"]
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a checkpoint"):
        store.load_checkpoint(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in this file system")
@pytest.mark.parametrize("name", ["manifest.json", "units/no-right-r1.s0-s1.json", "checkpoints/no-right-r1.s0-s1.pt", ".lock"])
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, name):
    """A read of one would wait for ever."""
    run(get("paired"), "smoke", out=tmp_path, jobs=1, only=("no-right-r1",), display=Display())
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if name.startswith("checkpoints"):
        path.parent.mkdir()
        next((tmp_path / "units").iterdir()).unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        run(get("paired"), "smoke", out=tmp_path, jobs=1, only=("no-right-r1",), resume=True, display=Display())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    store.write_json(path, {"a": 1})

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        store.write_json(path, {"a": 2})
    assert store.read_json(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        store.read_json(path)


def test_results_are_found_in_order(tmp_path, monkeypatch, toy):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "checkout", lambda: tmp_path / "source")
    with pytest.raises(FileNotFoundError, match="shippo run toy"):
        toy.result()
    row = {"name": "plain", "label": "", "config": {}, "seeds": [0], "metrics": {}, "curves": {}, "notes": {}, "seconds": 1.0}
    content = {"experiment": "toy", "preset": "full", "rows": [row], "versions": {}, "wall_seconds": 1.0}
    shipped = tmp_path / "source" / "results" / "toy.json"
    store.write_json(shipped, content)
    assert toy.result().source == "results/toy.json"
    store.write_json(tmp_path / "runs" / "toy" / "result.json", content)
    assert toy.result().source == "runs/toy/result.json"
    assert toy.result(shipped).source == "results/toy.json"
    with pytest.raises(FileNotFoundError, match="--preset smoke"):
        toy.result(preset="smoke")
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        toy.result(tmp_path / "elsewhere")
    store.write_json(shipped, content | {"experiment": "another"})
    with pytest.raises(ValueError, match="of 'another'"):
        toy.result(shipped)
    store.write_json(shipped, content | {"rows": []})
    with pytest.raises(ValueError, match="no finished row"):
        toy.result(shipped)
