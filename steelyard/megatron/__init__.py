"""Converts Megatron's launch scripts to recipes and commands, without running them.

`shell/` interprets a script, `import_script.py` finds the commands it starts, `flag_table.py` is the
table of flags.
"""

from steelyard.megatron.import_report import lines, result
from steelyard.megatron.import_script import Reading, read

__all__ = ["Reading", "lines", "read", "result"]
