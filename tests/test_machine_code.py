"""wgmma with A in registers, in the machine code: nothing writes those registers before it is waited for.

ptxas does not see to that itself, and sums are wrong where it happens: `keep` in csrc/cuda/sm90/ptx.cuh prevents it.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import zoo
from zoo.ops._library import build_info

LINE = re.compile(r"/\*([0-9a-f]+)\*/\s+(@!?U?P\d+ +)?(\S+)\s*(.*?);")
ISSUE = re.compile(r"HGMMA\.64x(\d+)x16\S* R(\d+), R(\d+), gdesc")  # columns, accumulators, A
READS_ONLY = ("ST", "BAR", "BRA", "R2UR", "SYNCS", "RED")


@dataclass
class Instruction:
    text: str
    follow: list[int]  # the addresses that may come next
    issue: tuple[int, int] | None = None  # registers in flight from here on, as bits: A's, the sums'
    waits: bool = False
    written: int = 0
    named: int = 0


def bits(registers: Iterable[int]) -> int:
    return sum(1 << r for r in set(registers))


def parse(lines: Iterable[str]) -> dict[int, Instruction]:
    """By address."""
    found = [match.groups() for line in lines if (match := LINE.search(line))]
    addresses = [int(address, 16) for address, *_ in found]
    code = {}
    for i, (_, predicate, name, operands) in enumerate(found):
        ends = not predicate and name.startswith(("BRA", "EXIT", "RET", "JMP")) and not name.startswith("BRA.DIV")
        follow = [] if ends or i + 1 == len(found) else [addresses[i + 1]]
        if name.startswith(("BRA", "CALL", "JMP")):
            follow += [int(target, 16) for target in re.findall(r"0x([0-9a-f]+)", operands)[-1:]]
        one = code[addresses[i]] = Instruction(f"{name} {operands}", follow)
        if name.startswith("HGMMA"):
            if issue := ISSUE.match(one.text):
                columns, first, a = map(int, issue.groups())
                one.issue = bits(range(a, a + 4)), bits(range(first, first + columns // 2))
        elif name.startswith("WARPGROUP.DEPBAR"):
            one.waits = operands.split(",")[-1].strip() == "0x0"  # for all, not for all but so many
        else:
            named = [int(r) for r in re.findall(r"(?<![A-Z])R(\d+)", operands)]
            one.named = bits(named)
            if named and not name.startswith(READS_ONLY) and re.match(r"(U?P(\d+|T), )?R\d", operands):
                size = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
                one.written = bits(range(named[0], named[0] + size))
    return code


def flying(code: dict[int, Instruction]) -> dict[int, tuple[int, int]]:
    """What may be in flight before each instruction, by every way that leads there: registers of A, and of sums."""
    before = dict.fromkeys(code, (0, 0))
    waiting = [address for address, one in code.items() if one.issue]
    while waiting:
        address = waiting.pop()
        a, sums = before[address]
        if (one := code[address]).issue:
            a, sums = a | one.issue[0], sums | one.issue[1]
        elif one.waits:
            a, sums = 0, 0
        for follow in one.follow:
            if follow not in before:
                continue
            known = before[follow]
            before[follow] = known[0] | a, known[1] | sums
            if before[follow] != known:
                waiting.append(follow)
    return before


def overwritten(text: Iterable[str]) -> Iterator[tuple[str, int, list[str]]]:
    """Of each kernel its name, how many wgmma take A from registers, and the instructions that touch what these use."""
    for name, lines in functions(text):
        if not any("HGMMA" in line for line in lines):
            continue
        code = parse(lines)
        count = sum(one.issue is not None for one in code.values())
        if count:
            before = flying(code)
            wrong = [
                one.text
                for address, one in code.items()
                if one.written & before[address][0] or (one.written | one.named) & before[address][1]
            ]
            yield name, count, wrong


def functions(text: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", []
    for line in text:
        if "Function : " in line:
            yield name, lines
            name, lines = line.split(" : ")[1].strip(), []
        else:
            lines.append(line)
    yield name, lines


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
        ("SHFL.IDX PT, R124, R3, R2, 0x1f", True),
    ],
)
def test_the_check_itself(instruction, is_wrong):
    ((name, count, wrong),) = overwritten(ISSUED.format(instruction).splitlines())
    assert name == "kernel" and count == 2 and bool(wrong) == is_wrong


AROUND = """\t\tFunction : loop
 /*0010*/ HGMMA.64x96x16.F32.BF16 R24, R124, gdesc[UR28], RZ, !UPT ; /* 0x1 */
 /*0020*/ @P1 BRA 0x60 ;
 /*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
 /*0040*/ MOV R125, R2 ;
 /*0050*/ BRA {} ;
 /*0060*/ MOV R124, R2 ;
 /*0070*/ EXIT ;
"""


def test_the_check_follows_every_way():
    ((_, _, wrong),) = overwritten(AROUND.format("0x10").splitlines())
    assert wrong == ["MOV R124, R2 "], "by the branch, past the wait"
    ((_, _, wrong),) = overwritten(AROUND.replace("@P1 BRA 0x60", "NOP").format("0x60").splitlines())
    assert not wrong, "after the wait"
    ((_, _, wrong),) = overwritten(AROUND.format("0x10").replace("gsb0, 0x0", "gsb0, 0x1").splitlines())
    assert len(wrong) == 2, "a wait for all but one is none"
    ((_, _, wrong),) = overwritten(AROUND.format("0x10").replace("@P1 BRA 0x60", "BRA.DIV UR4, 0x70").splitlines())
    assert not wrong
    unwaited = AROUND.format("0x10").replace("@P1 BRA 0x60", "BRA.DIV UR4, 0x70").replace("WARPGROUP.DEPBAR", "NOP")
    ((_, _, wrong),) = overwritten(unwaited.splitlines())
    assert wrong == ["MOV R125, R2 "], "it goes on, too"


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
    if not any("sm_90a" in architecture for architecture in build_info().get("architectures", [])):
        pytest.skip("the library has no code for sm_90a")
    assert len(found) >= 18, "the raw kernels and small's are there, each known by its wgmma"
    for name, _, wrong in found:
        assert not wrong, f"{name}: {wrong[:3]}"
