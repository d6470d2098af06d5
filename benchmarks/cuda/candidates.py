"""Launches worth timing for a product, and the table that the winners are written to.

choice.py of the CUDA backend reads such a table. Starts no kernel: measure.py times them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from headrace.backends.cuda.products.choice import KernelChoice, keeps_rows, read_table, rule
from headrace.backends.cuda.products.formats import WIDENED, MatrixFormat

SHARED_BYTES = 220 << 10  # of one program, of a Hopper's 227 KiB


def save(device_name: str, measured: dict[str, KernelChoice], path: Path) -> None:
    """Adds to what the file has for this device; the rest of it stays."""
    table = read_table(path.read_text(), str(path)) if path.is_file() else {}
    table[device_name] = table.get(device_name, {}) | measured
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {
        device: {key: asdict(launch) for key, launch in sorted(found.items())}
        for device, found in table.items()
    }
    staged = path.with_suffix(".part")
    staged.write_text(json.dumps(rows, indent=1) + "\n")
    staged.replace(path)


def candidates(format: MatrixFormat, outputs: int, columns: int, rows: int) -> list[KernelChoice]:
    """Launches worth timing: few, since each must be compiled."""
    found = [rule(format, outputs, columns, rows)]
    if rows == 1 and (format.dense or format is MatrixFormat.FP8):
        found += _row_candidates()
    if format is MatrixFormat.INT4:
        found += _int4_candidates(outputs <= 8192, rows)
    elif rows <= 256 or format is MatrixFormat.INT8:
        found += _dot_candidates(format, outputs <= 8192, rows)
    if format.dense or format is MatrixFormat.FP8:
        found.append(KernelChoice(kernel="library"))
    if format in WIDENED and rows >= 128:
        found.append(KernelChoice(kernel="widened"))
    if keeps_rows(format, outputs, columns):
        found = [one for one in found if one.whole_rows or one.kernel in ("row", "widened")]
    return [one for one in dict.fromkeys(found) if _fits(one, format)]


def _row_candidates() -> Iterable[KernelChoice]:
    for block_n, block_k, stages in ((4, 1024, 1), (8, 1024, 1), (16, 512, 1), (8, 512, 3)):
        yield KernelChoice(kernel="row", block_n=block_n, block_k=block_k, stages=stages)


# (outputs a tile, programs that share it, weights on the left), by whether outputs are few. Few
# outputs need sharing to fill the device; weights on the left take 64 outputs or more.
_TILES: dict[tuple[int, bool], tuple[tuple[int, int, bool], ...]] = {
    (16, True): (
        (32, 2, False),
        (32, 4, False),
        (64, 2, False),
        (64, 4, False),
        (64, 2, True),
        (64, 4, True),
        (128, 4, True),
    ),
    (16, False): (
        (32, 1, False),
        (64, 1, False),
        (128, 1, False),
        (64, 1, True),
        (128, 1, True),
        (128, 2, True),
    ),
    (64, True): ((32, 2, False), (64, 2, False), (64, 2, True), (64, 4, True), (128, 4, True)),
    (64, False): ((64, 1, False), (128, 1, False), (64, 1, True), (128, 1, True), (128, 2, True)),
    (256, True): ((64, 1, True), (128, 1, True), (64, 2, True), (128, 2, True), (128, 2, False)),
    (256, False): ((64, 1, True), (128, 1, True), (128, 1, False)),
}


def _dot_candidates(format: MatrixFormat, narrow: bool, rows: int) -> Iterable[KernelChoice]:
    block_m = min(128, max(16, 1 << (rows - 1).bit_length()))
    many = rows > 64
    # With scales for groups of columns a step is a group: more of them are on their way at once.
    grouped = format in (MatrixFormat.INT8, MatrixFormat.FP8_BLOCK)
    deep = (64 if many else 128) if format.dense else 128 if many or grouped else 256
    stages = 4 if block_m <= 32 or (format.dense and many) else 3
    if grouped and not many:
        stages += 2
    size = 16 if rows <= 16 else 64 if rows <= 64 else 256
    for block_n, parts, swap in _TILES[size, narrow]:
        yield KernelChoice(
            kernel="dot",
            block_m=block_m,
            block_n=block_n,
            block_k=deep,
            parts=parts,
            warps=4 if block_m * block_n < 64 * 128 else 8,
            stages=stages,
            swap=swap,
        )
    if grouped and many:  # sums and their scaling fill registers: small tiles, several at a time
        for block_n, swap in ((64, True), (128, False), (128, True)):
            yield KernelChoice(kernel="dot", block_m=64, block_n=block_n, stages=4, swap=swap)
    if format.dense and rows <= 16:  # the norm inside, where nobody shares a tile
        for block_n in (32, 64):
            yield KernelChoice(kernel="dot", block_n=block_n, stages=4, fuse_norm=True)
    if format is MatrixFormat.FP8 and rows <= 16:  # no launch to quantize the rows
        for block_n, parts in ((32, 2), (64, 2), (64, 4)) if narrow else ((64, 1), (128, 1)):
            yield KernelChoice(
                kernel="dot", block_n=block_n, parts=parts, stages=4, whole_rows=True
            )
        yield KernelChoice(
            kernel="dot",
            block_n=32 if narrow else 64,
            stages=4,
            fuse_norm=True,
            whole_rows=True,
        )


# (outputs a tile, programs that share it, warps, stages) of INT4, by rows and by whether outputs
# are few. Two warps or one, or 8 rows, make the compiler take the matrix instructions of a warp;
# else those of four warps together, which are faster from 64 rows on.
_INT4_TILES: dict[tuple[int, bool], tuple[tuple[int, int, int, int], ...]] = {
    (16, True): (
        (64, 4, 2, 4),
        (64, 8, 2, 4),
        (64, 8, 2, 6),
        (64, 11, 2, 4),
        (32, 4, 1, 4),
        (64, 8, 1, 4),
        (128, 8, 4, 4),
        (32, 8, 1, 5),
    ),
    (16, False): (
        (64, 1, 2, 4),
        (64, 2, 2, 4),
        (64, 2, 2, 6),
        (32, 1, 1, 5),
        (64, 1, 1, 4),
        (128, 1, 4, 5),
        (128, 2, 4, 4),
        (128, 2, 2, 4),
    ),
    (32, True): ((64, 4, 2, 4), (64, 8, 2, 4), (128, 4, 4, 4), (128, 8, 4, 4), (32, 4, 1, 4)),
    (32, False): ((64, 1, 2, 4), (64, 2, 2, 4), (128, 1, 4, 4), (128, 2, 4, 4), (32, 1, 1, 4)),
    (64, True): ((64, 4, 2, 4), (64, 4, 4, 4), (64, 8, 4, 3), (128, 4, 4, 3), (128, 8, 4, 3)),
    (64, False): ((64, 1, 2, 4), (64, 1, 4, 4), (128, 1, 4, 3), (128, 2, 4, 3), (128, 1, 8, 3)),
    (256, True): ((64, 2, 4, 3), (64, 4, 4, 3), (128, 2, 8, 3), (128, 4, 8, 3)),
    (256, False): ((64, 1, 4, 3), (128, 1, 8, 3), (128, 2, 8, 3)),
}


def _int4_candidates(narrow: bool, rows: int) -> Iterable[KernelChoice]:
    if rows > 256:  # one, to see how far it is from the library
        yield KernelChoice(kernel="dot", block_m=128, block_n=128, warps=8)
        return
    block_m = min(128, max(8, 1 << (rows - 1).bit_length()))
    size = max(16, block_m) if block_m <= 64 else 256
    for block_n, parts, warps, stages in _INT4_TILES[size, narrow]:
        yield KernelChoice(
            kernel="dot",
            block_m=block_m,
            block_n=block_n,
            parts=parts,
            warps=warps,
            stages=stages,
        )
    if block_m == 128:  # fewer rows a program, more programs
        yield KernelChoice(
            kernel="dot", block_m=64, block_n=128, parts=2 if narrow else 1, stages=3
        )


def _fits(launch: KernelChoice, format: MatrixFormat) -> bool:
    if launch.kernel != "dot":
        return True
    item = {
        MatrixFormat.F32: 4.0,
        MatrixFormat.BF16: 2.0,
        MatrixFormat.F16: 2.0,
        MatrixFormat.INT4: 0.5,
    }.get(format, 1.0)
    x_item = 2.0 if format is MatrixFormat.INT4 else item
    depth = launch.block_k * launch.stages
    return depth * (launch.block_n * item + launch.block_m * x_item) <= SHARED_BYTES
