"""Hello: every rank says who it is, and rank 0 prints it in rank order.

$ mpirun -n 4 python examples/01_hello.py
hello from rank 0 of 4
hello from rank 1 of 4
hello from rank 2 of 4
hello from rank 3 of 4
"""

import mpdist


async def main(world: mpdist.Communicator) -> None:
    greeting = f"hello from rank {world.rank} of {world.size}"
    # Lines that ranks print themselves may come in any order; only rank 0 gets the list, the others None.
    greetings = await world.gather_object(greeting, dst=0)
    if world.rank == 0:
        print("\n".join(greetings))


mpdist.run(main)
