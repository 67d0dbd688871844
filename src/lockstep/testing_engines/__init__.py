"""Engines for tests: a tiny model that generates for real behind an HTTP server that misbehaves when told to."""
