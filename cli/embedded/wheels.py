"""Where the wheels that carry programs lie; see core.wheels."""

from core.wheels import package_folder

__all__ = ["package_folder"]
