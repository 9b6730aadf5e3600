"""File formats: one line or row to one record and back. Nothing here knows of PCollections."""
