"""Megatron's launch scripts, read without running them, as recipes and commands.

`core/shell/` follows a script, `convert.py` finds what it starts, `flags.py` is the table of flags; the rest are the
parts of these.
"""

from steelyard.core.megatron.convert import Reading, read
from steelyard.core.megatron.report import lines, result

__all__ = ["Reading", "lines", "read", "result"]
