"""Starts jobs and their ranks, and ends all ranks when one fails."""
