"""The machine code of the kernels that bandwidth limits: loads of 16 bytes in flight before a use."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from emulator import ROOT

from tests.kernels.sass import (
    Instruction,
    disassemble,
    find_cuobjdump,
    most_in_flight,
    parse,
)
from tests.kernels.test_cuda_source import NVCC
from tests.release import release

CUOBJDUMP = find_cuobjdump()
needs_tools = pytest.mark.skipif(
    NVCC is None or CUOBJDUMP is None,
    reason="no nvcc or no cuobjdump: set CUDA_HOME or install the toolkit",
)
ARCHITECTURES = (release("sm_90a"), release("sm_100a"))
IN_FLIGHT = 4
"""Loads of 16 bytes a thread."""


Build = Callable[[str, str], dict[str, list[Instruction]]]


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> Build:
    """Return the kernels of a source for an architecture, each compiled once."""
    folder = tmp_path_factory.mktemp("sass")

    @cache
    def build(source: str, arch: str) -> dict[str, list[Instruction]]:
        target = folder / f"{source}_{arch}.cubin"
        flags = ["-O3", "-std=c++17", "-Icsrc", f"-arch={arch}", "-cubin"]
        command = [str(NVCC), *flags, f"csrc/cuda/{source}.cu", "-o", str(target)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        assert CUOBJDUMP is not None
        return disassemble(CUOBJDUMP, target)

    return build


@needs_tools
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["VpStatsKernel", "VpBackwardKernel"])
def test_logits_are_loaded_four_vectors_at_a_time(code, kernel, arch) -> None:
    found = {name: most_in_flight(body) for name, body in code("vp_logprob", arch).items()
             if kernel in name}  # fmt: skip
    assert len(found) == 3, "fp32, bf16 and fp16"
    assert all(count >= IN_FLIGHT for count in found.values()), found


@needs_tools
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_are_copied_and_summed_four_vectors_at_a_time(code, arch) -> None:
    found = {
        name: most_in_flight(body)
        for name, body in code("moe_permute", arch).items()
        if re.search(
            r"MoePermuteKernelI5uint4|MoeUnpermuteKernel\w+Float(16|32)ElementELi[48]", name
        )
        or re.search(r"MoeUnpermuteKernel\w+Bfloat16ElementELi8", name)
    }
    assert len(found) == 4, "copies; sums in fp32, bf16 and fp16"
    assert all(count >= IN_FLIGHT for count in found.values()), found


LISTING = """
\t\tFunction : {name}
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;  /* 0x0 */
        /*0020*/                   {between} ;      /* 0x0 */
        /*0030*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64+0x10] ;  /* 0x0 */
        /*0040*/                   FADD R12, R4, R8 ;      /* 0x0 */
        /*0050*/               @P1 BRA {target} ;      /* 0x0 */
        /*0060*/                   EXIT ;      /* 0x0 */
"""


@pytest.mark.parametrize(
    ("between", "target", "expected"),
    [
        ("IADD3 R13, R13, 0x1, RZ", "0x0", 2),
        ("FADD R13, R7, R7", "0x0", 1),  # R7 is the last of the four that the first load fills
        ("DADD R14, R6.64, R14", "0x0", 1),
        ("BRA 0x30", "0x0", 1),
        ("IADD3 R13, R13, 0x1, RZ", "0x30", 1),  # jumped to from below
        ("LDG.E.64 R14, desc[UR4][R2.64]", "0x0", 2),  # of 8 bytes: not counted
    ],
)
def test_what_counts_as_in_flight(between, target, expected) -> None:
    text = LISTING.format(name="Kernel", between=between, target=target)
    assert most_in_flight(parse(text)["Kernel"]) == expected


def test_a_listing_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown form"):
        parse("Function : Kernel\nLDG R1, [R2]")


def test_the_disassembler_is_found_by_its_folder(monkeypatch, tmp_path: Path) -> None:
    tool = tmp_path / "bin/cuobjdump"
    tool.parent.mkdir()
    tool.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_cuobjdump() == tool
