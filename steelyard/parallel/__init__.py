"""Distributed training: rank detection, rendezvous, the mesh, and the parallelism applied to a model."""
