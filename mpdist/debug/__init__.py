"""Debug mode: each collective is compared between the ranks before it runs."""

from mpdist.debug.check import install_debug

__all__ = ["install_debug"]
