"""Machine code on disk: nothing is unpickled, and nothing is run that somebody else could have written."""

import errno
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shippo_ssm.engine import cache, compiler, launch, run


class Operands(NamedTuple):
    x: Any


def build_double():
    def double(operands, start, stop):
        for i in range(start, stop):
            operands.x[i] *= 2

    return double


def doubled(folder):
    """Run a kernel with its machine code in `folder`."""
    before = os.environ.get("SHIPPO_CACHE_DIR")
    os.environ["SHIPPO_CACHE_DIR"] = str(folder)
    try:
        run._kernels.clear()
        x = np.ones(3)
        launch(build_double, 3, Operands(x))
        assert x.tolist() == [2, 2, 2]
    finally:
        os.environ.pop("SHIPPO_CACHE_DIR")
        if before is not None:
            os.environ["SHIPPO_CACHE_DIR"] = before


class Payload:
    """A pickle that makes a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of a kernel that was compiled, and its file."""
    monkeypatch.setattr(run, "_kernels", {})
    monkeypatch.setattr(cache, "_warned", False)
    doubled(tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    return file.parent, file


@pytest.fixture
def warned(caplog):
    """How many warnings there were."""
    return lambda: sum("kernels on disk are ignored" in record.getMessage() for record in caplog.records)


def usable(file):
    return cache.load(file.parent, file.name) is not None


def test_only_this_user_can_read_and_write(kept):
    folder, file = kept
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_bytes().startswith(cache.MAGIC)
    assert usable(file)


def test_a_file_with_a_pickle_is_not_run(kept, tmp_path):
    """Not even one with the right name, owner and mode; a new process reads it as well."""
    folder, file = kept
    for head in (b"", cache.MAGIC):
        file.write_bytes(head + pickle.dumps(Payload(tmp_path / "run")))
        assert not usable(file)
        doubled(folder)
        assert not (tmp_path / "run").exists()
        # It was replaced by what was compiled.
        assert usable(file)
    file.write_bytes(pickle.dumps(Payload(tmp_path / "run")))
    code = "import sys; sys.path.insert(0, sys.argv[1]); from test_cache import doubled; doubled(sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), str(folder)], timeout=120, check=True)
    assert not (tmp_path / "run").exists()


def open_to_all(folder, file):
    file.chmod(0o666)


def folder_open_to_all(folder, file):
    folder.chmod(0o777)


def link(folder, file):
    os.replace(file, folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


def pipe(folder, file):
    file.unlink()
    os.mkfifo(file)


def directory(folder, file):
    file.unlink()
    file.mkdir()


@pytest.mark.skipif(os.name != "posix", reason="modes and owners of POSIX")
@pytest.mark.parametrize("attack", [open_to_all, folder_open_to_all, link, pipe, directory])
def test_what_others_could_have_written_is_ignored(kept, warned, attack):
    """With one warning, and without waiting for a pipe."""
    folder, file = kept
    attack(folder, file)
    for _ in range(2):
        doubled(folder)
    assert warned() == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("whose", ["file", "folder"])
def test_what_belongs_to_another_user_is_ignored(kept, warned, whose):
    folder, file = kept
    os.chown(file if whose == "file" else folder, 12345, 12345)
    doubled(folder)
    assert warned() == 1


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "garbage", "renamed", "function", "symbol"])
def test_a_damaged_file_is_compiled_again(kept, warned, damage):
    folder, file = kept
    whole = file.read_bytes()
    code = cache.load(folder, file.name)
    assert code is not None
    file.write_bytes(
        {
            "empty": b"",
            "cut": whole[:-100],
            "changed": whole[:-100] + bytes(100),
            "garbage": os.urandom(5000),
            "renamed": whole.replace(file.name.encode(), b"x" * len(file.name)),
            # A name that is not in the object code has no address.
            "function": whole.replace(code.function.encode(), b"x" * len(code.function), 1),
            "symbol": cache._pack(code._replace(externals=["no_such_symbol"]), file.name),
        }[damage]
    )
    assert usable(file) == (damage == "symbol")
    doubled(folder)
    assert warned() == 0
    assert file.read_bytes() != b""
    assert usable(file)


def test_code_that_this_process_cannot_link_is_refused():
    code = cache.MachineCode("f", "g", [], ["no_such_symbol"], b"")
    with pytest.raises(ValueError, match="no_such_symbol"):
        compiler.link("kernel", code)


def test_a_folder_that_cannot_be_made_is_not_an_error(monkeypatch, tmp_path):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.save(tmp_path / "new", "kernel", cache.MachineCode("f", "g", [], [], b""))
    assert list((tmp_path / "new").iterdir()) == []
