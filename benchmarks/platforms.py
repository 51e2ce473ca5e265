"""Compile every kernel for other processors, and keep what was compiled and what was run in results/platforms.json.

    python -m benchmarks.platforms                       # compile; nothing is run on the other processors
    python -m benchmarks.platforms --log NAME FILE       # add the outcome of `pytest -v`, run on NAME, from its log

Data path: in a process of its own Numba compiles for x86-64 without AVX; the calls of `benchmarks.compilation` make it compile
every kernel, and run it. The LLVM code of each is then given to LLVM's back ends for `TARGETS`, which emit object code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "results" / "platforms.json"
# Triple and processor.
TARGETS = {
    "x86-64 without AVX": ("x86_64-unknown-linux-gnu", "x86-64"),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic"),
    "aarch64, Neoverse N1": ("aarch64-unknown-linux-gnu", "neoverse-n1"),
    "aarch64, Apple M1": ("arm64-apple-macosx14.0.0", "apple-m1"),
}
# Numba's reference counts have been compiled for this machine before they are linked to a kernel: in them LLVM's back end for
# x86 has put an instruction of its own, "subtract, and is the result zero", where it found the lines below.
X86_COUNT = r"@llvm\.x86\.atomic\.sub\.cc\.i64\((.*?), i32 4\)"
COUNT = """
define internal i8 @subtract_is_zero(ptr %count, i64 %less) {
  %before = atomicrmw sub ptr %count, i64 %less seq_cst
  %zero = icmp eq i64 %before, %less
  %byte = zext i1 %zero to i8
  ret i8 %byte
}
"""
GENERIC = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "", "ATEN_CPU_CAPABILITY": "default"}


def emit(code: str, triple: str, processor: str) -> bytes:
    """Object code for a processor from the LLVM code of a kernel."""
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=processor, opt=3, reloc="pic")
    code = re.sub(r'^target triple = ".*"$', f'target triple = "{triple}"', code, flags=re.M)
    code = re.sub(r'^target datalayout = ".*"$', f'target datalayout = "{machine.target_data}"', code, flags=re.M)
    if not triple.startswith("x86"):
        code = re.sub(X86_COUNT, r"@subtract_is_zero(\1)", code) + COUNT
        # LLVM would end the process.
        if foreign := set(re.findall(r"call .*(@llvm\.x86\.[\w.]+)", code)):
            raise RuntimeError(f"instructions of x86: {sorted(foreign)}")
    module = binding.parse_assembly(code)
    module.verify()
    return machine.emit_object(module)


def compile_all(widths: tuple[int, ...]) -> dict[str, Any]:
    """How many kernels each target has object code for, its bytes, and what failed."""
    from benchmarks.compilation import cases
    from shippo_ssm import _private
    from shippo_ssm.engine import compiler

    codes: list[tuple[str, str]] = []
    called = []
    compile_result = compiler.compile_result

    def listen(builder: Any, kinds: Any, constants: dict[str, Any]) -> Any:
        result = compile_result(builder, kinds, constants)
        codes.append((builder.__name__, str(result.library._final_module)))
        return result

    compiler.compile_result = listen
    for name, call in cases(widths):
        print(name, flush=True)
        call()
        called.append(name)
    outcome: dict[str, Any] = {"compiled by": _private.target_machine()[:2], "calls": called, "targets": {}}
    for name, target in TARGETS.items():
        sizes, failed = [], []
        for kernel, code in codes:
            try:
                sizes.append(len(emit(code, *target)))
            except RuntimeError as error:
                failed.append(f"{kernel}: {error}")
        outcome["targets"][name] = {"kernels": len(sizes), "bytes": sum(sizes), "failed": failed}
    return outcome


def read_log(text: str) -> dict[str, Any]:
    """The outcome of every test in the log of `pytest -v`."""
    outcomes: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "SKIPPED": [], "ERROR": []}
    for test, outcome in re.findall(r"^(\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)", text, flags=re.M):
        outcomes[outcome].append(test)
    files = sorted({test.partition("::")[0] for tests in outcomes.values() for test in tests})
    return {"files": files, "passed": len(outcomes["PASSED"]), "skipped": len(outcomes["SKIPPED"]),
            "failed": outcomes["FAILED"] + outcomes["ERROR"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--log", nargs=2, metavar=("NAME", "FILE"))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        Path(options.inside).write_text(json.dumps(compile_all(tuple(options.widths))))
        return
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"compiled": {}, "run": {}}
    if options.log:
        name, file = options.log
        result["run"][name] = read_log(Path(file).read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "outcome.json"
            command = [sys.executable, "-m", "benchmarks.platforms", "--inside", str(file)]
            command += ["--widths", *map(str, options.widths)]
            subprocess.run(command, env=os.environ | GENERIC | {"SHIPPO_CACHE_DIR": folder}, check=True)
            result["compiled"] = json.loads(file.read_text())
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
