"""Scripts that run in a subprocess, since what they load may be missing, slow, or crash.

They use only the standard library and the syntax of Python 3.6, because they may run in a container or on another node,
where an old interpreter should report its version instead of a SyntaxError.
"""
