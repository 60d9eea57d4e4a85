"""Streams and datasets."""
