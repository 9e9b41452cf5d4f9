"""Tuning a model on conversations: what is read, how it is written out, which tokens are trained, what is added."""
