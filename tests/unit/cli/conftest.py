"""Homes in these tests have short paths."""

from tests.short_paths import tmp_path

__all__ = ["tmp_path"]
