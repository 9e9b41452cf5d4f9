"""Parameters, FLOPs and bytes as functions of the recipe. Nothing here builds a model."""
