"""Kernels for GPUs compile without one and spill nothing; the file is theirs; the model is the arithmetic it says."""

import json

import pytest

from benchmarks import gpu as model
from benchmarks.gpu_code import RESULT, TARGETS, Instruction, alone, kernels, loops, parse, record, units
from benchmarks.problem import Shape
from benchmarks.roof import bytes_moved

CODE = json.loads(RESULT.read_text())
AGAIN = "run `python -m benchmarks.gpu_code`, `python -m benchmarks.gpu` and `python docs/generate.py`"


# The largest kernel for one target of each maker, others once; the file has every kernel for every target.
@pytest.mark.parametrize(
    ("name", "target"),
    [("scan gradients", "sm_90"), ("scan forward, training", "gfx942"), ("expm", "sm_100"), ("expm", "sm_80")],
)
def test_the_flagship_compiles_without_a_gpu_and_spills_nothing(name, target):
    made = record(name, 0, target)
    assert made["stack"] == 0
    assert made in CODE["kernels"], f"{RESULT.name} shows other machine code; {AGAIN}"


def test_the_file_has_every_kernel_configuration_and_target():
    listed = [(row["kernel"], row["target"], row.get("BG", row.get("BM")), row["warps"]) for row in CODE["kernels"]]
    wanted = [
        (name, target, config.sizes[0][1], config.num_warps)
        for name, kernel in kernels().items()
        for target in TARGETS
        for config in kernel.configs
    ]
    assert sorted(listed) == sorted(wanted), AGAIN
    assert all(row["stack"] == 0 for row in CODE["kernels"] if row["kernel"].startswith("scan"))


def test_the_predictions_follow_from_the_file():
    bench = json.loads(RESULT.with_name("bench.json").read_text())
    assert json.loads(json.dumps(model.measure(CODE, bench))) == CODE["model"], AGAIN


def test_the_model_by_hand():
    """One program per processor, a loop of 100 float instructions that waits 500 cycles: every term by hand."""
    a100 = model.GPUS[0]
    assert a100.clock == pytest.approx(1.41e9, rel=1e-2)
    shape = Shape(batch=1, length=10, groups=108)
    loop = {"instructions": {"FFMA": 100}, "units": {"float": 100, "exchange": 0}, "alone": 500.0}
    made = {"BG": 1, "BT": 2, "STAGES": 5, "warps": 1, "registers": 64, "shared": 1024, "loops": [loop]}
    terms = model.terms(a100, shape, made, model.work_of("scan forward", shape))
    assert terms.order == pytest.approx(5 * 500 / a100.clock)
    # 16 lanes of a scheduler take two cycles for a warp.
    assert terms.issue == pytest.approx(5 * 200 / a100.clock)
    assert terms.memory == pytest.approx(bytes_moved(shape, "forward") / 2.039e12)
    assert terms.flight == pytest.approx(5 * 600e-9 / 4)
    assert terms.binds() == "order"


def test_units_of_a_loop():
    """Pairs take the units for floats twice; what passes through shared memory counts by its width, shared numbers once."""
    words = {"FFMA2": 1, "FADD": 1, "LDGSTS": 4, "STS": 4, "LDS": 4, "STG": 2, "SHFL": 1, "MOV": 1}
    body = [Instruction(word, (), (), size) for word, size in words.items()]
    # 4 + 4 + 1 + 2 + 1, and 3 more, since what was stored is read by every lane for itself.
    assert units(body) == {"float": 3, "exchange": 15}


def test_the_work_of_a_backward_pass():
    """Two spans of a sequence: the adjoint alone goes through one of them."""
    shape = Shape()
    adjoint, gradients = (model.work_of(kernel, shape) for kernel in ("scan adjoint", "scan gradients"))
    assert (adjoint.programs, adjoint.positions) == (16, 256)
    assert (gradients.programs, gradients.positions) == (32, 256)
    assert adjoint.floats == 0.5 * 53 + 0.5
    assert gradients.floats == 89 + 85 + 32 + 0.5


def test_instructions_wait_for_their_operands():
    line = "        /*0a10*/              @!P0 LDS.128 R4, [R12+UR5] ;"
    assert parse(line) == Instruction("LDS", ("R4", "R5", "R6", "R7"), ("P0", "R12", "UR5"), 4)
    assert parse("        /*0a20*/                   STG.E [R2.64], R5 ;") == Instruction("STG", (), ("R2", "R5"))
    chain = [Instruction("FFMA", ("R1",), ("R1",))]
    assert alone(chain) == 4
    many = [Instruction("FFMA", (f"R{k}",), (f"R{k}",)) for k in range(8)]
    assert alone(many) == 8
    assert alone(many, float_lanes=16) == 16
    listing = f".L_x_0:\n{line}\n        /*0a30*/                   FADD R1, R1, R4 ;\n        /*0a40*/  @P0 BRA `(.L_x_0) ;\n"
    (only,) = loops(listing)
    assert only["instructions"] == {"LDS": 1, "FADD": 1, "BRA": 1}
