"""Corruptions."""
