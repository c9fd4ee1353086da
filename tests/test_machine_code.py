"""wgmma with A in registers, in the machine code: nothing writes those registers before it is waited for.

ptxas does not see to that itself, and sums are wrong where it happens: `keep` in csrc/cuda/sm90/ptx.cuh prevents it.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import zoo

LINE = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ +)?(\S+)\s*(.*?);")
ISSUE = re.compile(r"HGMMA\.64x(\d+)x16\S* R(\d+), R(\d+), gdesc")  # columns, accumulators, A
READS_ONLY = ("ST", "BAR", "BRA", "R2UR", "SYNCS", "RED")


def overwritten(code: Iterable[str]) -> Iterator[tuple[str, int, list[str]]]:
    """Of each kernel its name, how many wgmma take A from registers, and the instructions that touch what these use."""
    name, count, wrong, busy, sums = "", 0, [], set(), set()
    for line in code:
        if "Function : " in line:
            if count:
                yield name, count, wrong
            name, count, wrong, busy, sums = line.split(" : ")[1].strip(), 0, [], set(), set()
            continue
        match = LINE.search(line) if busy or "HGMMA" in line else None
        if not match:
            continue
        instruction, operands = match.groups()
        if instruction.startswith("HGMMA"):
            if issue := ISSUE.match(f"{instruction} {operands}"):
                count += 1
                columns, first, a = map(int, issue.groups())
                sums |= set(range(first, first + columns // 2))
                busy |= set(range(a, a + 4))
        elif instruction.startswith("WARPGROUP.DEPBAR"):
            busy, sums = set(), set()
        elif busy:
            named = [int(r) for r in re.findall(r"(?<![A-Z])R(\d+)", operands)]
            written = set()
            if named and not instruction.startswith(READS_ONLY) and re.match(r"(P\d+, )?R\d", operands):
                size = 4 if ".128" in instruction else 2 if ".64" in instruction or ".WIDE" in instruction else 1
                written = set(range(named[0], named[0] + size))
            if written & busy or (written | set(named)) & sums:
                wrong.append(f"{instruction} {operands}")
    if count:
        yield name, count, wrong


def disassembler() -> str | None:
    beside = shutil.which("nvcc")
    found = shutil.which("cuobjdump") or (beside and shutil.which("cuobjdump", path=str(Path(beside).parent)))
    if not found:
        try:
            import triton.backends.nvidia as bundled
        except ImportError:
            return None
        found = shutil.which("cuobjdump", path=str(Path(bundled.__file__).parent / "bin"))
    return found


ISSUED = """\t\tFunction : kernel
 /*0010*/ HGMMA.64x96x16.F32.BF16 R24, R124, gdesc[UR28], RZ, !UPT ; /* 0x1 */
 /*0020*/ HGMMA.64x96x16.F32.BF16 R24, R128, gdesc[UR40], R24, gsb0 ; /* 0x1 */
 /*0030*/ {} ;
 /*0040*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
 /*0050*/ FADD R124, R24, R124 ;
"""


@pytest.mark.parametrize(
    ("instruction", "is_wrong"),
    [
        ("FADD R2, R120, R121", False),
        ("PRMT R123, R80, 0x7632, R75", False),
        ("PRMT R131, R80, 0x7632, R75", True),
        ("@!P0 LDS.64 R122, [R8]", False),
        ("@!P0 LDS.64 R123, [R8]", True),
        ("STS.128 [R3], R124", False),
        ("FADD R2, R71, R2", True),
        ("FADD R2, R72, R2", False),
        ("R2UR UR28, R5", False),
    ],
)
def test_the_check_itself(instruction, is_wrong):
    ((name, count, wrong),) = overwritten(ISSUED.format(instruction).splitlines())
    assert name == "kernel" and count == 2 and bool(wrong) == is_wrong


@pytest.mark.slow
def test_registers_of_a_are_left_alone():
    library = next(Path(zoo.__file__).parent.glob("_C_cuda*.so"), None)
    if library is None:
        pytest.skip("zoo was built without the CUDA core")
    if (tool := disassembler()) is None:
        pytest.skip("there is no cuobjdump")
    with subprocess.Popen([tool, "-sass", library], stdout=subprocess.PIPE, text=True) as process:
        found = list(overwritten(process.stdout))
    assert process.returncode == 0
    if not found:
        pytest.skip("the library has no code for sm_90a")
    for name, _, wrong in found:
        assert not wrong, f"{name}: {wrong[:3]}"
