"""Ring: a token goes from rank to rank, and each adds its number to it.

A receive without an array allocates one of the size and dtype that arrives,
so that the token can grow on its way.

$ mpirun -n 4 python examples/02_ring.py
the token came back from rank 3 and has visited [0, 1, 2, 3]
"""

import numpy as np

import mpdist


async def main(world: mpdist.Communicator) -> None:
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    if world.rank > 0:
        token = await world.recv(src=left)
        await world.send(np.append(token.data, world.rank), dst=right)
        return

    # Posted before the receive and awaited after it: a ring of one rank sends to itself.
    sending = world.send(np.array([0]), dst=right)
    token = await world.recv(src=left)
    await sending
    print(f"the token came back from rank {token.src} and has visited {token.data.tolist()}")


mpdist.run(main)
