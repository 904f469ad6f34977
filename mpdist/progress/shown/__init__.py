"""Shown: messages whose data stay on the sender's device, where their receiver takes them.

What travels is an ordinary message that says where the data are: so they match, keep their order,
are probed and stay queued like all others. Nobody waits for a device of another: the sender tells
when the data have been computed, the receiver when it has them, both by words in shared memory.
"""
