"""Scripts that run in processes of their own, since what they load may be missing, slow, or crash.

They use the standard library and the oldest syntax that hosts have (Python 3.6), because the interpreter that is asked
may be a container's or a neighbour's, and the answer of an old one should be its version, not a SyntaxError.
"""
