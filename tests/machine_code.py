"""Say whether two checkouts' kernels compile to the same machine code: the proof of a change of
form.

``python tests/machine_code.py OTHER [cuda/scan_any.cu ...]``, with OTHER another checkout, compiles
each source of ``kernels/`` here and there with the flags of ``packmamba.ops.build`` and compares
functions: the processor's instructions (objdump) and the GPU's with their registers (cuobjdump, of
the wheel nvidia-cuda-cuobjdump; for ``PACKMAMBA_CUDA_ARCHS``, 90 by default; no GPU is needed).
Names may differ, since symbols are numbered as they appear, and so may the order of functions and
the lines of the sources, since ``__LINE__`` is defined away. Exit status 1 where a function
differs.
"""

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packmamba.ops.build import _output, describe, kernel_folder

FUNCTION = re.compile(r"\n(?=[0-9a-f]{16} <|\s*Function : )")
SYMBOL = re.compile(r"<[^<>]*>|\b_Z\w+|\.L[C0-9]\w*|\.(?:text|rodata)[.\w]*")
NO_LINES = ["-Wno-builtin-macro-redefined", "-D__LINE__=0"]


def instructions(function: str) -> str:
    """Return a function's disassembly without its name and addresses, its symbols numbered."""
    numbers: dict[str, str] = {}
    lines = []
    for line in function.splitlines()[1:]:
        line = re.sub(r"^\s*[0-9a-f]+:\s*|^\s*/\*[0-9a-f]{4,}\*/|Disassembly of .*", "", line)
        line = re.sub(r"\b[0-9a-f]+ (?=<)|\b[0-9a-f]+: (?=R_X86)", "", line)
        # A branch within a function shows its offset from the function's name.
        line = re.sub(r"<[^<>]*\+(0x[0-9a-f]+)>", r"+\1", line)
        for symbol in SYMBOL.findall(line):
            line = line.replace(symbol, numbers.setdefault(symbol, f"symbol{len(numbers)}"))
        lines.append(" ".join(line.split()))
    return "\n".join(line for line in lines if line and line != "...")


def _sections(target: str) -> str:
    """Return the hexadecimal dump of an object's constants."""
    parts = _output("objdump", "-s", target).split("Contents of section ")
    return "".join(part for part in parts if part.startswith(".rodata.cst"))


def machine_code(source: Path, folder: str) -> Counter[str]:
    """Compile a source; count its functions by their instructions, the processor's and the GPU's."""
    recipe = describe(source.parent.name)
    # Of a copy, because __FILE__ must be as long in both checkouts.
    copy = Path(shutil.copytree(source.parent, f"{folder}/kernels")) / source.name
    target = f"{folder}/{source.name}.o"
    no_lines = NO_LINES if recipe.kind == "cpu" else [f"-Xcompiler={','.join(NO_LINES)}"]
    _output(recipe.compiler, *recipe.flags, *no_lines, "-c", str(copy), "-o", target)
    listing = _output("objdump", "-drw", "--no-show-raw-insn", target)
    # Words of constants, which instructions read from memory.
    numbers = re.findall(r"(?m)^ [0-9a-f]+((?: [0-9a-f]{8})+)", _sections(target))
    others = sorted(" ".join(numbers).split())
    if recipe.kind == "cuda":
        listing += _output("cuobjdump", "-sass", target)
        others += re.findall(r"REG:.*", _output("cuobjdump", "-res-usage", target))
    return Counter([*map(instructions, FUNCTION.split(listing)[1:]), *others])


def compare(here: Path, there: Path) -> bool:
    """Compare a source of both checkouts and print what was found."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        code_here = machine_code(here, one)
        code_there = machine_code(there, other)
    different = (code_here - code_there).total() + (code_there - code_here).total()
    verdict = f"{different} differ" if different else "same"
    print(f"{here.parent.name}/{here.name}: {code_here.total()} functions and constants, {verdict}", flush=True)
    return not different


if __name__ == "__main__":
    os.environ.setdefault("PACKMAMBA_CUDA_ARCHS", "90")
    top = kernel_folder()
    other_top = Path(sys.argv[1]).resolve() / "kernels"
    every = (str(path.relative_to(top)) for path in sorted(top.glob("*/*.c*")) if path.suffix != ".cuh")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda name: compare(top / name, other_top / name), sys.argv[2:] or every))
    sys.exit(not all(results))
