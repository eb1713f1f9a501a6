"""Reads the machine code of a cubin (`cuobjdump -sass`) and counts loads in flight."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

WIDE = 16
"""Bytes of the widest load."""


class Instruction(NamedTuple):
    address: int
    opcode: str
    """Its suffixes are kept, its predicate is not: "LDG.E.128.CONSTANT"."""
    operands: str


def find_cuobjdump() -> Path | None:
    """Return NVIDIA's disassembler: of the toolkit, of the PATH, or the one in triton's wheel."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [Path(home, "bin", "cuobjdump") for home in homes if home]
    if found := shutil.which("cuobjdump"):
        candidates.append(Path(found))
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        candidates.append(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")
    return next((path for path in candidates if path.exists()), None)


def disassemble(cuobjdump: Path, cubin: Path) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel, by its mangled name."""
    command = [str(cuobjdump), "-sass", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return parse(text)


def parse(text: str) -> dict[str, list[Instruction]]:
    """Raises ValueError where there is no instruction: a listing of an unknown form."""
    kernels: dict[str, list[Instruction]] = {}
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        line = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);"
        kernels[name.strip()] = [
            Instruction(int(address, 16), opcode, operands.strip())
            for address, opcode, operands in re.findall(line, body)
        ]
    if not kernels or not all(kernels.values()):
        raise ValueError(f"a listing of an unknown form:\n{text[:2000]}")
    return kernels


def registers(operands: str) -> set[int]:
    """Return the numbers of all registers named, both of a pair ("R2.64")."""
    found = set()
    for number, pair in re.findall(r"\bR(\d+)(\.64)?", operands):
        found |= {int(number), int(number) + 1} if pair else {int(number)}
    return found


def load_bytes(instruction: Instruction) -> int:
    """Return the bytes a thread that a load of global memory brings; 0 for anything else."""
    kind, *suffixes = instruction.opcode.split(".")
    if kind != "LDG":
        return 0
    small = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    return next((small[suffix] for suffix in suffixes if suffix in small), 4)


def most_in_flight(code: list[Instruction], num_bytes: int = WIDE) -> int:
    """Return how many loads of `num_bytes` a thread starts, at most, before one of them is used.

    Counted within a basic block: a jump, or a place that is jumped to, starts anew.
    """
    jumps = ("BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "BSYNC", "WARPSYNC")
    targets = {
        int(target, 16)
        for one in code
        if one.opcode.split(".")[0] in (*jumps, "BSSY")
        for target in re.findall(r"0x([0-9a-f]+)", one.operands)
    }
    most, waiting, count = 0, set[int](), 0
    for one in code:
        if (
            one.address in targets
            or one.opcode.split(".")[0] in jumps
            or (registers(one.operands) & waiting)
        ):
            waiting, count = set(), 0
        if load_bytes(one) == num_bytes:
            first = int(re.findall(r"\bR(\d+)", one.operands)[0])
            waiting |= set(range(first, first + max(1, num_bytes // 4)))
            count += 1
            most = max(most, count)
    return most
