"""Checks, one file per topic. A check inspects a `Machine` and returns findings; it changes nothing."""
