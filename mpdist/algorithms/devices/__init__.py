"""Devices: collectives of the ranks of one node over memory of their GPUs that all of them have open."""
