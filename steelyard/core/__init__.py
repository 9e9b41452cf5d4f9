"""Shared by all packages: recipe, run folder, errors, console, files and units. Nothing here imports torch."""
