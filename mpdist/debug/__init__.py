"""Debug mode: each collective is compared between the ranks before it runs, and the memory of operations is guarded."""

from mpdist.debug.check import install_debug

__all__ = ["install_debug"]
