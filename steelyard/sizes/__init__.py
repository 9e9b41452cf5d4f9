"""Parameters, FLOPs and bytes as functions of the recipe, without building a model."""
