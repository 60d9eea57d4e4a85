"""Timings of steps (`steps`), corruptions (`corruptions`), ranks (`scale`) and the paper's evaluation (`cost`).

They are for tables and files, never for tests.
"""
