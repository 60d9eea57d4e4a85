collect_ignore = ["plain_cotta.py", "rolled_petal.py"]  # plugins: whoever imports one adds methods
