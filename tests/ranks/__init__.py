"""A small pytest plugin: tests that run on every rank of an MPI job, in one report.

The outer pytest collects and reports; for each folder of tests and rank count it launches
`mpiexec` once, and every rank runs the same tests in step with the inner half.
"""
