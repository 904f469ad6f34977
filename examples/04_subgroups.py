"""Subgroups: the ranks form a table, and every row and every column is a communicator of its own.

Each rank knows one number, its rank. Its row and its column add theirs up;
rank 0 prints the table with the sums at its margins. The collectives of
different groups run at the same time and do not disturb each other.

$ mpirun -n 4 python examples/04_subgroups.py
   0   1 |   1
   2   3 |   5
---------+----
   2   4 |   6
"""

from math import isqrt

import numpy as np

import mpdist


def table_shape(size: int) -> tuple[int, int]:
    """Rows and columns, as square as `size` allows; one row for a prime number."""
    rows = max(n for n in range(1, isqrt(size) + 1) if size % n == 0)
    return rows, size // rows


def show(cells: np.ndarray) -> str:
    """A table of (value, sum of its row, sum of its column) in text."""
    values, row_sums, column_sums = cells[..., 0], cells[:, 0, 1], cells[0, :, 2]
    lines = ["".join(f"{v:4}" for v in row) + f" |{total:4}" for row, total in zip(values, row_sums, strict=True)]
    lines.append("-" * (4 * values.shape[1] + 1) + "+----")
    lines.append("".join(f"{total:4}" for total in column_sums) + f" |{values.sum():4}")
    return "\n".join(lines)


async def main(world: mpdist.Communicator) -> None:
    rows, columns = table_shape(world.size)
    row, column = divmod(world.rank, columns)

    cell = np.array([world.rank, 0, 0])
    async with world.split(color=row) as my_row, world.split(color=column) as my_column:
        row_sum = my_row.all_reduce(cell[:1], out=cell[1:2])
        column_sum = my_column.all_reduce(cell[:1], out=cell[2:])
        await row_sum
        await column_sum

    cells = await world.gather(cell, dst=0)
    if world.rank == 0:
        print(show(cells.reshape(rows, columns, 3)))


mpdist.run(main)
