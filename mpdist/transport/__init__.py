"""Transports: how bytes get from rank to rank. The one home of mpi4py."""
