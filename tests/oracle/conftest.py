collect_ignore = ["plain_cotta.py"]  # a plugin: whoever imports it adds a method
