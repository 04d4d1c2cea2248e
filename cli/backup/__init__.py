"""`tidegate backup` and `tidegate restore`: an installation in one file, and back (ADR 0017)."""
