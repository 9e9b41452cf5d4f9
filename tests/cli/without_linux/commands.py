"""Runs commands one after the other in one process, so that torch is imported once: a JSON list of the words of each.

Its exit code is the largest of theirs.
"""

import json
import sys

from steelyard.cli import main


def exit_code(words):
    print(f"$ steelyard {' '.join(words)}", file=sys.stderr, flush=True)
    try:
        main(words)
    except SystemExit as ended:
        return ended.code


if __name__ == "__main__":  # Workers of data tokenize import this file again.
    sys.exit(max([exit_code(words) for words in json.loads(sys.argv[1])]))
