"""Real picture files of other projects, through the command line. `make test-pictures`; not part of `make test`."""
