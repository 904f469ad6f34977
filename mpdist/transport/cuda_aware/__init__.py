"""CUDA-aware: which operations of this MPI may be given the memory of a GPU.

claim      what the library says of itself
probe      what a trial in other processes shows: they may crash
cache      the trial's answers, kept for each installation
table      what is made of all that, and of the user's word
question   who is asked, in which order
awareness  when it is asked, and what the answer is until then

An MPI that is handed a pointer that it cannot use ends the process. So what is not
known to work is staged through host memory, and nothing is tried here.
"""

from mpdist.transport.cuda_aware.awareness import Awareness
from mpdist.transport.cuda_aware.table import Answer

__all__ = ["Answer", "Awareness"]
