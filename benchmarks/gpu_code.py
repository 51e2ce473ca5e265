"""The machine code of every kernel for GPUs, made without a GPU: `python -m benchmarks.gpu_code [--out FILE]`.

Data path: `KERNELS` names each kernel with the arguments it is compiled for and the configurations that autotuning may choose;
Triton's compiler makes code for each of `TARGETS` (no driver is needed), `cuobjdump` says what registers, stack and shared
memory it takes, and `nvdisasm` gives the instructions of its loops. Stack is where spilled registers go: a kernel without a
stack spills nothing. For AMD the compiler's own listing says all of it. Two processes share the work.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.problem import Shape
from shippo_ssm.engine import Config

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}
RESULT = Path(__file__).resolve().parents[1] / "results" / "gpu.json"
ORDER, WIDTH = 32, 4
# Another width of right actions.
WIDER = (8,)


class Kernel(NamedTuple):
    """One kernel as it is compiled."""

    room: str
    """Its package, for a kernel in `_triton_kernels.py`, or its module."""
    function: str
    constants: dict[str, Any]
    """Compile-time arguments; an operand that is not there is `None`."""
    configs: tuple[Config, ...]
    dtype: str = "fp32"
    """Of all operands."""


def kernels() -> dict[str, Kernel]:
    """Every kernel at the flagship shape, N 32, P 4, rank 1, and some more kinds of operands."""
    import torch

    from shippo_ssm.actions.expm import GPU_SCHEMES, gpu_configs
    from shippo_ssm.layers.cell import step_configs
    from shippo_ssm.scan.triton import FORWARD, GRADIENTS, SILENT, configs, keep_every, span_of

    shape = Shape()
    scan: dict[str, Any] = {
        "G": shape.groups, "SHARED": 1, "N": ORDER, "P": WIDTH, "RANK": 1, "HAS_RIGHT": True, "HAS_SEEN": False,
        "VARYING": False, "HAS_INITIAL": True, "HAS_BOUNDS": False, "EVEN": True, "DTYPE": "float32", "seen": None,
        "bounds": None,
    }  # fmt: skip
    through = {"MIRROR": False, "READS": True, "KEEP": 0, "kept": None}
    through = scan | through
    training = {name: constant for name, constant in through.items() if name != "kept"} | {"KEEP": keep_every(WIDTH)}
    size = span_of(shape.batch * shape.groups, shape.length)
    adjoint = training | {"MIRROR": True, "READS": False, "KEEP": size}
    adjoint |= dict.fromkeys(("y", "read", "final"))
    silent = through | {"MIRROR": True, "READS": False, "HAS_INITIAL": False} | dict.fromkeys(("y", "read", "initial"))
    back = scan | {"KEEP": keep_every(WIDTH), "SPAN": size, "whose": None}
    whole = {"N": ORDER, "P": WIDTH, "HAS_RIGHT": True, "DTYPE": "float32"}
    decode, together = whole | {"SHARED": 1, "RANK": 1, "VARYING": False}, {"SHARED": shape.groups}
    forward, quiet, backward = (configs(ORDER, WIDTH, **asked) for asked in (FORWARD, SILENT, GRADIENTS))

    def shown(constants: dict[str, Any]) -> dict[str, Any]:
        return {name: constant for name, constant in constants.items() if name != "seen"} | {"HAS_SEEN": True}

    scheme = GPU_SCHEMES[torch.float32]
    rights = {}
    for width in (WIDTH, *WIDER):
        title = "" if width == WIDTH else f", P {width}"
        exp = {"DEGREE": scheme.degree, "THETA": scheme.theta, "P": width, "DTYPE": "float32"}
        for name, more in (("expm", {"FRECHET": False, "direction": None}), ("expm backward", {"FRECHET": True})):
            rights[name + title] = Kernel("actions._expm_triton", "expm", exp | more, gpu_configs(width))
    return {
        "scan forward": Kernel("scan", "scan", through, forward),
        "scan forward, training": Kernel("scan", "scan", training, forward),
        "scan adjoint": Kernel("scan", "scan", adjoint, quiet),
        "scan gradients": Kernel("scan", "gradients", back | {"dseen": None}, backward),
        "segment adjoint": Kernel("scan", "scan", silent, quiet),
        "decode step": Kernel("layers._cell_triton", "cell_step", decode, step_configs(ORDER, WIDTH)),
        "scan forward, shared": Kernel("scan", "scan", through | together, forward),
        "scan gradients, shared": Kernel("scan", "gradients", back | together | {"dseen": None}, backward),
        "decode step, shared": Kernel("layers._cell_triton", "cell_step", decode | together, step_configs(ORDER, WIDTH)),
        "cell forward, training": Kernel("scan", "scan", shown(training), forward[:1]),
        "cell gradients": Kernel("scan", "gradients", shown(back), backward[:1]),
        "scan forward, bfloat16": Kernel("scan", "scan", through, forward[:1], "bf16"),
        **rights,
    }


def compile_kernel(kernel: Kernel, config: Config, target: str) -> Any:
    """The compiled kernel, its stages in `.asm`."""
    import importlib

    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    module = kernel.room if "." in kernel.room else f"{kernel.room}._triton_kernels"
    function = getattr(importlib.import_module(f"shippo_ssm.{module}"), kernel.function)
    constants: dict[str, Any] = kernel.constants | dict(config.sizes)
    constants = {name: getattr(tl, value) if name == "DTYPE" else value for name, value in constants.items()}
    scalars = dict.fromkeys(("length", "groups", "crowd", "count", "positions"), "i32") | {"bounds": "*i64", "whose": "*i64"}
    signature = {
        name: "constexpr" if name in constants else scalars.get(name, f"*{kernel.dtype}") for name in function.arg_names
    }
    # Tensors begin on 16 bytes, and so do the rows of 16 groups.
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name not in (*constants, "length")
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": config.num_warps, "enable_fp_fusion": True}
    return compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def describe(compiled: Any, target: str) -> dict[str, Any]:
    """Registers, stack and shared memory of compiled code; for NVIDIA also the instructions of its innermost loops."""
    if "amdgcn" in compiled.asm:
        listing = compiled.asm["amdgcn"]
        found = {
            name: int(re.findall(rf"\.{name}:\s*(\d+)", listing)[0]) for name in ("vgpr_count", "private_segment_fixed_size")
        }
        return {
            "registers": found["vgpr_count"],
            "stack": found["private_segment_fixed_size"],
            "shared": compiled.metadata.shared,
            "loops": [],
        }
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(binary))
        listing = _tool("nvdisasm", "-c", str(binary))
    # Ampere's data-centre GPUs have half of the others' units for floats.
    lanes = 16 if target == "sm_80" else 32
    registers, stack = (int(number) for number in re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    return {"registers": registers, "stack": stack, "shared": compiled.metadata.shared, "loops": loops(listing, lanes)}


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


class Instruction(NamedTuple):
    """One instruction of a listing, as far as order and waiting matter."""

    word: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    words: int = 1
    """Registers of a lane that go to memory or come from there; small matrices of one instruction."""


# Cycles until a result can be used, by the first letters of the instruction; 4 for all others. Measured by others on Ampere and
# Hopper; the assumptions of the model, not facts about a run.
LATENCY = {"SHFL": 24, "LDS": 24, "LDSM": 30, "MUFU": 20, "S2R": 20, "R2UR": 8, "U": 6, "BAR": 20, "DEPBAR": 10, "CALL": 20}
# Instructions of the units for floats, which also multiply integers, and those of two numbers in a lane.
FLOATS = ("FFMA", "FMUL", "FADD", "FSEL", "FSETP", "HFMA2", "IMAD")
PACKED = ("FFMA2", "FMUL2", "FADD2")
# What exchanges numbers with other lanes or with memory.
EXCHANGE = ("LDGSTS", "LDSM", "STSM", "STS", "LDS", "SHFL", "LDG", "STG")
# Instructions that write no register.
SILENT = ("ST", "BAR", "BRA", "LDGSTS", "LDGDEPBAR", "DEPBAR", "NOP", "EXIT", "RED", "BSYNC", "WARPSYNC", "SYNCS")


def parse(line: str) -> Instruction | None:
    """The instruction on a line of `nvdisasm`, or `None`."""
    found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z0-9]+)((?:\.\w+)*)\s*(.*?)\s*;", line)
    if found is None:
        return None
    guard, word, kinds, rest = found.groups()
    operands = rest.split(",")
    written = [] if word.startswith(SILENT) else operands[:1]
    # A comparison writes two predicates.
    if word.endswith("SETP") or word == "PLOP3":
        written = operands[:2]
    writes = [name for operand in written for name in re.findall(r"\bU?[RP]\d+", operand)]
    for size, more in ((".128", 4), (".64", 2)):
        if size in kinds and writes and writes[0].startswith("R"):
            writes = [f"R{int(writes[0][1:]) + k}" for k in range(more)]
    reads = re.findall(r"\bU?[RP]\d+", " ".join([guard or "", *operands[len(written) :]]))
    words = next((words for size, words in ((".128", 4), (".64", 2), (".M88.4", 4), (".M88.2", 2)) if size in kinds), 1)
    return Instruction(word, tuple(writes), tuple(reads), words)


def units(body: list[Instruction]) -> dict[str, int]:
    """Cycles of the units that can hold a scheduler, or all of a processor, up: those for floats, 32 lanes wide, and the shared
    memory, through which 128 bytes pass in a cycle.

    Four words of a lane at once are read from there by lanes that share them, the numbers of a group, which pass once; but what
    the loop itself has stored, and does not read as small matrices, every lane reads for itself.
    """
    passed = collections.Counter()
    for word, _, _, words in body:
        passed[word] += 1 if word == "LDS" and words == 4 else words
    turned = max(0, passed["STS"] + passed["STSM"] - passed["LDSM"])
    return {
        "float": sum(2 if word in PACKED else 1 for word, *_ in body if word.startswith(FLOATS)),
        "exchange": sum(passed[word] for word in EXCHANGE) + turned * 3 // 4,
    }


def alone(body: list[Instruction], float_lanes: int = 32, rounds: int = 6) -> float:
    """Cycles of one round of a loop for a warp that has its scheduler to itself: in order, one instruction per cycle at most,
    each when its operands are there, and the units for floats if it needs one of them: they are `float_lanes` wide. Loads from
    global memory are taken to have arrived."""
    ready: dict[str, int] = {}
    now, begin, free = 0, 0, 0
    for turn in range(rounds):
        if turn == 2:
            begin = now
        for word, writes, reads, _ in body:
            now = max([now + 1, *(ready.get(name, 0) for name in (*reads, *writes))])
            if word.startswith(FLOATS):
                now = max(now, free)
                free = now + (2 if word in PACKED else 1) * 32 // float_lanes
            wait = next((cycles for letters, cycles in LATENCY.items() if word.startswith(letters)), 4)
            if word.startswith(("BAR", "DEPBAR")):
                now += wait
            ready |= dict.fromkeys(writes, now + wait)
    return (now - begin) / (rounds - 2)


def loops(listing: str, float_lanes: int = 32) -> list[dict[str, Any]]:
    """The innermost loops of a listing, in their order: how often each instruction stands there, `units` and `alone`.

    A loop is a jump backwards.
    """
    lines = listing.splitlines()
    places = {line[:-1].strip(): at for at, line in enumerate(lines) if re.match(r"\.L_x_\d+:", line)}
    spans = []
    for at, line in enumerate(lines):
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if jump and places.get(jump.group(1), at) < at - 1:
            spans.append((places[jump.group(1)], at))
    inner = [
        span for span in spans if not any(span != other and span[0] <= other[0] and other[1] <= span[1] for other in spans)
    ]
    found = []
    for low, high in inner:
        body = [instruction for line in lines[low : high + 1] if (instruction := parse(line)) is not None]
        counts = collections.Counter(instruction.word for instruction in body)
        found.append(
            {"instructions": dict(counts.most_common()), "units": units(body), "alone": round(alone(body, float_lanes), 1)}
        )
    return found


def record(name: str, place: int, target: str) -> dict[str, Any]:
    """One line of the result: kernel `name` in its configuration `place` on `target`."""
    kernel = kernels()[name]
    config = kernel.configs[place]
    found = describe(compile_kernel(kernel, config, target), target)
    return {"kernel": name, "target": target, **dict(config.sizes), "warps": config.num_warps, **found}


def _record(work: tuple[str, int, str]) -> dict[str, Any]:
    made = record(*work)
    print(work, {key: made[key] for key in ("registers", "stack", "shared")}, file=sys.stderr, flush=True)
    return made


def measure() -> dict[str, Any]:
    """All kernels, configurations and targets."""
    import triton

    work = [(name, at, target) for name, kernel in kernels().items() for target in TARGETS for at in range(len(kernel.configs))]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return {"triton": triton.__version__, "kernels": pool.map(_record, work, chunksize=1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile every kernel for every gpu.")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the JSON goes")
    options = parser.parse_args()
    options.out.write_text(json.dumps(measure(), indent=1) + "\n")
