"""What every room stands on: recipe, run folder, errors, console, files and units. Nothing here imports torch."""
