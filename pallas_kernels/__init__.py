"""Paged attention for JAX: the pages, the ops on them, and their implementations.

Axis letters, here and in all signatures: T tokens of a step, S rows, P page table entries a row, N pages in the pool,
K token slots a page (page_size), Hq query heads, Hkv KV heads, D head_dim.
"""

from .api import attend_and_write, attend_and_write_qkv, paged_attention, plan_attention, write_kv
from .dispatch import current_platform, default_implementation, resolve_implementation, supported_implementations
from .layer import LayerWeights, after_attention, layer_plan
from .metadata import PagedMetadata
from .norm import add_rms_norm, norm_implementation
from .page_ops import copy_pages, gather_pages, replace_pages, scatter_pages
from .pages import KVPages, PageSpec, make_pages
from .rope import Rope, apply_rope
from .split_product import gated_product, split_product
from .validate import validate_dynamic, validate_static

__all__ = [
    "KVPages",
    "LayerWeights",
    "PageSpec",
    "PagedMetadata",
    "Rope",
    "add_rms_norm",
    "after_attention",
    "apply_rope",
    "attend_and_write",
    "attend_and_write_qkv",
    "copy_pages",
    "current_platform",
    "default_implementation",
    "gated_product",
    "gather_pages",
    "layer_plan",
    "make_pages",
    "norm_implementation",
    "paged_attention",
    "plan_attention",
    "replace_pages",
    "resolve_implementation",
    "scatter_pages",
    "split_product",
    "supported_implementations",
    "validate_dynamic",
    "validate_static",
    "write_kv",
]
