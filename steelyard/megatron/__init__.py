"""Converts Megatron's launch scripts to recipes and commands, without running them.

`shell/` interprets a script, `import_script.py` finds the commands it starts, `flag_table.py` is the
table of flags.
"""

from steelyard.megatron.import_report import lines, result
from steelyard.megatron.import_script import ImportResult, read

__all__ = ["ImportResult", "lines", "read", "result"]
