"""What a request costs, beside the peers, in one run: `make bench`, `make bench-full`."""
