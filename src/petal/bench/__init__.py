"""Timings of adaptation steps (`steps`) and of corruptions (`corruptions`), for tables and files, never for tests."""
