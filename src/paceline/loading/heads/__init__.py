"""Draft heads from checkpoint folders: EAGLE-3 and 3.1, and multi-token prediction modules."""

from paceline.loading.heads.load import LoadedHead, check_mtp, is_head, load_head, load_mtp
from paceline.loading.heads.shipped import shipped_head

__all__ = ["LoadedHead", "check_mtp", "is_head", "load_head", "load_mtp", "shipped_head"]
