"""The clients that are compared, one module each; each is a command that reads requests and writes answers."""
