"""What compiles, keeps and runs kernels: records of operands, machine code on disk, threads, vector instructions."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shippo_ssm import _private
from shippo_ssm.engine import (
    Emitter,
    Pointer,
    cache_directory,
    compiler,
    launch,
    memory,
    recycled,
    run,
    simd,
)


@pytest.fixture(autouse=True)
def _threads():
    """No test leaves another number of threads behind."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def build_scale(factor):
    def scale(operands, start, stop):
        for i in range(start, stop):
            operands.x[i] *= factor

    return scale


class Operands(NamedTuple):
    x: Any


def scaled(count, factor, first=0):
    """Ones of which those from `first` on were multiplied by a kernel."""
    x = np.ones(count)
    launch(build_scale, count - first, Operands(x[first:]), factor=factor)
    return x.tolist()


@pytest.fixture
def compilations(monkeypatch):
    """Names of the kernels that were really compiled, with an empty memory of earlier ones."""
    names: list[str] = []
    monkeypatch.setattr(compiler, "_announce", names.append)
    monkeypatch.setattr(run, "_kernels", {})
    return names


def test_compiled_code_is_kept_on_disk(monkeypatch, tmp_path, compilations):
    monkeypatch.setenv("SHIPPO_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert cache_directory() == tmp_path / "new" / "cache"
    for attempt in range(3):
        run._kernels.clear()
        assert scaled(3, 3.0, first=1) == [1.0, 3.0, 3.0]
        (file,) = (tmp_path / "new" / "cache").iterdir()
        assert len(compilations) == (1 if attempt < 2 else 2)
        if attempt == 1:
            file.write_bytes(b"damaged")
    assert scaled(2, 2.0) == [2.0, 2.0]
    assert len(list((tmp_path / "new" / "cache").iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_a_compilation_only(monkeypatch, tmp_path, compilations):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHIPPO_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert scaled(2, 5.0) == scaled(2, 5.0) == [5.0, 5.0]
    assert len(compilations) == 1


def test_no_home_directory_costs_a_compilation_only(monkeypatch, compilations):
    """As in a container whose user has no entry in the list of users."""
    import pwd

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("SHIPPO_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory() is None
    assert scaled(2, 6.0) == scaled(2, 6.0) == [6.0, 6.0]
    assert len(compilations) == 1


def test_a_write_that_fails_leaves_nothing(monkeypatch, tmp_path):
    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("SHIPPO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "replace", full)
    assert scaled(2, 8.0) == [8.0, 8.0]
    assert not list(tmp_path.iterdir())


def test_first_compilation_is_said_once(monkeypatch, tmp_path, capsys, caplog):
    monkeypatch.delenv("SHIPPO_QUIET", raising=False)
    monkeypatch.setattr(compiler, "_announced", False)
    with caplog.at_level("INFO", logger="shippo_ssm"):
        compiler._announce("a")
        compiler._announce("b")
    assert capsys.readouterr().err.count("compiling CPU kernels") == 1
    assert [record.getMessage() for record in caplog.records] == [f"compiling {name} for this machine" for name in "ab"]


def test_an_environment_variable_hides_the_line(monkeypatch, capsys):
    monkeypatch.setattr(compiler, "_announced", False)
    monkeypatch.setenv("SHIPPO_QUIET", "1")
    compiler._announce("a")
    assert capsys.readouterr().err == ""


def test_compiler_settings_do_not_leak(monkeypatch, tmp_path, compilations):
    from numba.core import config

    def settings():
        return {name: value for name, value in vars(config).items() if name.isupper()}

    monkeypatch.setenv("SHIPPO_CACHE_DIR", str(tmp_path))
    before = settings()
    scaled(1, 7.0)
    assert compilations
    assert settings() == before


def build_count():
    def count(operands, start, stop):
        for i in range(start, stop):
            operands.x[i] += 1

    return count


def build_greedy():
    def greedy(operands, start, stop):
        room = np.empty(operands.x[start])
        operands.x[start] = room.size

    return greedy


# Threads of OpenMP, and one alone where there are none.
TEAMS = pytest.mark.parametrize("parallel", [_private.openmp_parallel(), 0], ids=["team", "alone"])


@TEAMS
def test_every_item_is_computed_once(monkeypatch, parallel):
    monkeypatch.setattr(run, "_parallel", parallel)
    torch.set_num_threads(2)
    for n in (0, 1, 5, 1001):
        seen = np.zeros(1001, dtype=int)
        launch(build_count, n, Operands(seen))
        assert seen.tolist() == [1] * n + [0] * (1001 - n)
    # From several Python threads at once.
    seen = [np.zeros(1001, dtype=int) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda x: launch(build_count, 1001, Operands(x)), seen)) == [None] * 8
    assert all(x.tolist() == [1] * 1001 for x in seen)


@TEAMS
def test_a_kernel_without_memory_says_so(monkeypatch, parallel):
    monkeypatch.setattr(run, "_parallel", parallel)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        launch(build_greedy, 2, Operands(np.ones(2, dtype=int)))
        with pytest.raises(MemoryError, match=r"no memory left|Allocation failed"):
            launch(build_greedy, 2, Operands(np.full(2, 1 << 59)))


AT_THE_END = """
import builtins
import numpy as np
import torch
from typing import Any, NamedTuple
from shippo_ssm.engine import launch, run

class Operands(NamedTuple):
    x: Any

def build():
    def count(operands, start, stop):
        for i in range(start, stop):
            operands.x[i] += i
    return count

class Last:
    def __init__(self):
        self.x, self.launch, self.operands, self.build = np.zeros(9), launch, Operands, build

    def __del__(self):
        self.launch(self.build, 9, self.operands(self.x))
        print(sum(self.x.tolist()))

run._parallel = PARALLEL
torch.set_num_threads(2)
builtins.last = Last()
launch(build, 9, Operands(np.zeros(9)))
"""


@pytest.mark.parametrize("parallel", ["None", "0"], ids=["team", "alone"])
def test_work_at_interpreter_shutdown(parallel):
    """No other thread may enter Python then: waiting for one would never end."""
    script = AT_THE_END.replace("PARALLEL", parallel)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["36.0"], done.stderr


class Pair(NamedTuple):
    left: Any
    right: Any


class Nested(NamedTuple):
    pair: Pair
    missing: Any
    shift: int
    out: Any


def build_dot(length):
    @simd("float32", 8)
    def dot(emit: Emitter, pair: Any, out: Pointer, i: Any) -> None:
        total, start = emit.variable(), emit.times(i, length)
        for n in emit.blocks(length):
            total.set(emit.fma(emit.load(pair.left, emit.at(start, n)), emit.load(pair.right, emit.at(start, n)), total.get()))
        emit.store_sums(out, i, [total.get()])

    def kernel(operands, start, stop):
        for i in range(start, stop):
            dot(operands.pair, operands.out, i)
            operands.out[i] += operands.shift + operands.missing.size

    return kernel


def test_records_may_be_nested_and_reach_the_vector_instructions():
    left, right, out = torch.randn(5, 11), torch.randn(11, 5).mT.requires_grad_(), torch.empty(5)
    launch(build_dot, 5, Nested(Pair(left, right), None, 2, out), length=11)
    torch.testing.assert_close(out, (left * right.detach()).sum(-1) + 2)


def test_a_prefetch_asks_for_every_line_also_of_a_short_row():
    from llvmlite import ir

    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.FloatType().as_pointer()]), "rows")
    emit = Emitter(ir.IRBuilder(function.append_basic_block()), "float32", 8)
    for length, lines in ((0, 0), (1, 1), (16, 1), (40, 3)):
        before = str(module).count('call void @"llvm.prefetch')
        emit.prefetch(Pointer(function.args[0]), 0, length)
        assert str(module).count('call void @"llvm.prefetch') - before == lines


def build_reversed():
    @simd("float32", 8)
    def turn(emit: Emitter, pair: Any, i: Any) -> None:
        for k in emit.each(3):
            place = emit.builder.sub(emit.at(emit.times(i, 24), 16), emit.times(k, 8))
            row = emit.load(pair.left, emit.at(emit.times(i, 24), emit.times(k, 8)), padded=True)
            emit.store(pair.right, place, row, padded=True)

    def kernel(pair, start, stop):
        for i in range(start, stop):
            turn(pair, i)

    return kernel


def test_loops_at_run_time():
    left, right = torch.randn(5, 3, 8), torch.empty(5, 3, 8)
    launch(build_reversed, 5, Pair(left, right))
    assert torch.equal(right, left.flip(1))


class Places(NamedTuple):
    pair: Pair
    out: int


def build_sums_of_short(storage):
    @simd("float32", 8)
    def add(emit: Emitter, places: Any, i: Any) -> None:
        left, right = (emit.pointer(address, storage) for address in places.pair)
        place = emit.times(i, 8)
        total = emit.add(emit.load(left, place, padded=True), emit.load(right, place, padded=True))
        emit.store(emit.pointer(places.out, "float32"), place, total, padded=True)

    def kernel(places, start, stop):
        for i in range(start, stop):
            add(places, i)

    return kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_records_of_addresses(dtype):
    """Short numbers are widened when they are loaded."""
    left, right = (torch.randint(-128, 127, (5, 8), dtype=torch.int8).to(dtype) for _ in range(2))
    out = torch.empty(5, 8)
    places = Places(Pair(left.data_ptr(), right.data_ptr()), out.data_ptr())
    launch(build_sums_of_short, 5, places, raw=True, storage=str(dtype).removeprefix("torch."))
    assert torch.equal(out, left.float() + right.float())


def build_rounded(lanes: int):
    @simd("float32", lanes)
    def copy(emit, pair, start):
        wide, short = emit.pointer(pair.left, "float32"), emit.pointer(pair.right, "bfloat16")
        for i in emit.blocks(lanes):
            emit.store(short, emit.at(start, i), emit.load(wide, emit.at(start, i)))

    def kernel(pair, start, stop):
        for block in range(start, stop):
            copy(pair, block * lanes)

    return kernel


@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
def test_bfloat16_is_rounded_as_torch_does_it(lanes):
    """To the nearest, ties to even, whatever the width: some processors have an instruction for some."""
    ties = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -1.0 - 2.0**-8, 1.0 + 2.0**-8 + 2.0**-20])
    edges = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38])
    numbers = torch.cat([ties, edges, torch.randn(24), torch.zeros(16)])
    out = torch.zeros(48, dtype=torch.bfloat16)
    launch(build_rounded, 48 // lanes, Pair(numbers.data_ptr(), out.data_ptr()), raw=True, lanes=lanes)
    assert torch.equal(out.nan_to_num(7.0), numbers.bfloat16().nan_to_num(7.0))
    assert out.isnan().sum() == 1


def test_operands_of_another_dtype_take_another_kernel(compilations):
    for dtype in (np.float64, np.int64):
        x = np.ones(3, dtype)
        launch(build_scale, 3, Operands(x), factor=2)
        assert x.tolist() == [2, 2, 2]
    assert len(run._kernels) == 2


def test_machine_code_is_known_by_its_module_and_the_engine(monkeypatch, tmp_path):
    kinds = (Operands, np.dtype("float64"))
    here = compiler._digest(build_scale, kinds, {"factor": 2.0})
    assert here == compiler._digest(build_scale, kinds, {"factor": 2.0})
    assert here != compiler._digest(build_scale, kinds, {"factor": 3.0})
    assert here != compiler._digest(build_scale, (Pair, *kinds[1:] * 2), {"factor": 2.0})
    moved = tmp_path / "kernels.py"
    moved.write_text("def build_scale(factor): ...")
    monkeypatch.setattr(compiler.inspect, "getfile", lambda builder: str(moved))
    assert here != compiler._digest(build_scale, kinds, {"factor": 2.0})


def test_kernels_from_disk_and_new_ones_do_not_meet(tmp_path):
    """Numba names functions by a count that starts anew in each process: the second one here counts as the first did."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_engine import scaled; "
        "print([scaled(1, float(factor)) for factor in sys.argv[2:]])"
    )

    def scaled_elsewhere(*factors):
        command = [sys.executable, "-c", code, str(Path(__file__).parent), *factors]
        environment = os.environ | {"SHIPPO_CACHE_DIR": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert scaled_elsewhere("2", "3") == "[[2.0], [3.0]]"
    assert scaled_elsewhere("3", "4", "2", "5") == "[[3.0], [4.0], [2.0], [5.0]]"


def test_large_memory_is_used_again():
    """Only once nothing refers to it, views included; by what is nearly as large as well, and by nothing else."""
    size = (1 << 22) - 192
    first = torch.from_numpy(recycled(size))
    place, view = first.data_ptr(), first[64:]
    del first
    assert recycled(size).ctypes.data != place
    del view
    assert recycled((1 << 22) + 1).ctypes.data != place
    assert recycled(15 << 18).ctypes.data != place
    assert recycled((15 << 18) + 1).ctypes.data == place
    assert recycled(1 << 22).ctypes.data == place
    assert place % 64 == 0


@pytest.mark.parametrize(
    ("line", "file", "text", "limits"),
    [
        ("0::/", "memory.max", "4096\n", [4096]),
        ("0::/a/b", "a/memory.max", "8192\n", [8192]),
        ("0::/seen/from/outside", "memory.max", "4096\n", [4096]),
        ("0::/", "memory.max", "max\n", []),
        ("4:memory:/a", "memory/a/memory.limit_in_bytes", "4096\n", [4096]),
        ("3:cpu:/a", "memory/a/memory.limit_in_bytes", "4096\n", []),
        ("nonsense", "memory.max", "4096\n", []),
    ],
)
def test_the_limit_of_a_container_is_found(tmp_path, line, file, text, limits):
    groups, root = tmp_path / "cgroup", tmp_path / "root"
    groups.write_text(line + "\n")
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text(text)
    assert memory.container_limits(groups, root) == limits
    assert memory.container_limits(tmp_path / "none", root) == []


def test_idle_memory_is_an_eighth_of_the_container(monkeypatch):
    monkeypatch.setattr(memory, "container_limits", lambda *places: [64 << 20])
    assert memory._max_idle_bytes.__wrapped__() == 8 << 20
