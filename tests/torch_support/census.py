"""Census: which tests of PyTorch's suite a backend passes; a line of JSON for each, on each rank.

mpirun -n 3 python tests/torch_support/census.py gloo OUT [FIRST]: writes OUT.0, OUT.1, ... and stops at the first
test that fails, as ranks may be out of step then; start again with the number of the next one. Nothing of it is
collected by pytest.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from torch_support import suite

import mpdist

LIMIT_SECONDS = 90


def main(backend: str, out: str, first: int = 0) -> None:
    world = mpdist.init()
    logging.disable(logging.ERROR)
    names = suite.names()
    with open(f"{out}.{world.rank}", "a") as log:
        for place, name in enumerate(names[first:], first):
            faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
            outcome = suite.outcome(name, backend)
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps([place, name, outcome]), file=log, flush=True)
            if any(world.all_gather_object(outcome.startswith("failed")).wait()):
                time.sleep(0.5)
                os._exit(3)  # MPI's end would wait for what a failed test has left


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:4]))
