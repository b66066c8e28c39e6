"""The command line: parses arguments, calls the library, prints results. No other package imports it."""
