"""Megatron's launch scripts, read without running them, as recipes and commands.

`shell/` interprets a script, `import_script.py` finds what it starts, `flag_table.py` is the
table of flags.
"""

from steelyard.megatron.import_report import lines, result
from steelyard.megatron.import_script import Reading, read

__all__ = ["Reading", "lines", "read", "result"]
