"""Paged attention for JAX: the pages, the ops on them, and their implementations.

Axis letters, here and in all signatures: T tokens of a step, S rows, P page table entries a row, N pages in the pool,
K token slots a page (page_size), Hq query heads, Hkv KV heads, D head_dim.
"""

from .api import attend_and_write, paged_attention, plan_attention, write_kv
from .dispatch import current_platform, default_implementation, resolve_implementation, supported_implementations
from .metadata import PagedMetadata
from .page_ops import copy_pages, gather_pages, replace_pages, scatter_pages
from .pages import KVPages, PageSpec, make_pages
from .rope import Rope, apply_rope
from .validate import validate_dynamic, validate_static

__all__ = [
    "KVPages",
    "PageSpec",
    "PagedMetadata",
    "Rope",
    "apply_rope",
    "attend_and_write",
    "copy_pages",
    "current_platform",
    "default_implementation",
    "gather_pages",
    "make_pages",
    "paged_attention",
    "plan_attention",
    "replace_pages",
    "resolve_implementation",
    "scatter_pages",
    "supported_implementations",
    "validate_dynamic",
    "validate_static",
    "write_kv",
]
