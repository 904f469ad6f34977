"""Shared: collectives of the ranks of one node over memory that all of them map."""
