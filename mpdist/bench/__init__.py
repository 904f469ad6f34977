"""What `mpdist bench` does: operations, contenders, rounds, and what is made of the times.

A layer below the command line, above the runtime: it uses the public API only.
"""
