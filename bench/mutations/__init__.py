"""Put small mistakes into copies of the library and see which tests notice: `python -m bench.mutations --help`."""
