"""`kernel_class`: what a kernel of a step does, by its name and by the name scope of the operations it was made of.

Imports no jax.
"""

import re
from collections.abc import Mapping
from typing import Final

# Order counts: the first that is found names the class.
_BY_NAME: Final = (
    ("copy", r"^mem(cpy|set)"),
    ("KV write", r"write_kv|kv_write|rope_and_write|replace_pages"),
    ("attention", r"paged_attention|attention_(decode|prefill)|ragged_paged|flash|plan_attention"),
    ("norm", r"norm"),
    ("GEMM", r"nvjet|gemm|gemv|cublas|cutlass|xmma|splitk|(^|_)dot($|_)|matmul|convolution"),
    ("activation", r"silu|swiglu|gelu"),
    ("sampling", r"sampl|argmax|gumbel|top_k"),
)
_BY_SCOPE: Final = (
    ("sampling", r"/sample(/|$)|logprobs(/|$)"),
    ("GEMM", r"dot_general|/logits(/|$)"),
    ("norm", r"/norm(/|$)"),
    ("KV write", r"write_kv|rope"),
    ("attention", r"paged_attention|plan_attention"),
    ("activation", r"/mlp(/|$)"),
)
CLASSES: Final = ("GEMM", "attention", "KV write", "norm", "activation", "sampling", "copy", "other")
_INSTRUCTION: Final = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?op_name=\"([^\"]*)\"", re.MULTILINE)


def scopes_of(program: str) -> dict[str, str]:
    """Kernel name -> name scope, of the text of a compiled program: a kernel is called like the instruction it runs.

    Example:
      >>> scopes_of('  %loop_add_fusion.3 = bf16[8] fusion(%a), metadata={op_name="jit(step)/layer_0/mlp/add"}')
      {'loop_add_fusion_3': 'jit(step)/layer_0/mlp/add'}
    """
    return {re.sub(r"[.-]", "_", name): scope for name, scope in _INSTRUCTION.findall(program)}


def kernel_class(name: str, scopes: Mapping[str, str] | None = None) -> str:
    """One of `CLASSES`.

    Args:
      name: of the kernel, as a profile gives it.
      scopes: of the instructions of the forward pass, where they are known; a fusion's own name says little.

    Example:
      >>> kernel_class("nvjet_sm90_tst_128x128"), kernel_class("paged_attention_decode_mosaic_gpu_kernel")
      ('GEMM', 'attention')
      >>> kernel_class("loop_fusion_2", {"loop_fusion_2": "jit(step)/layer_0/norm/mul"}), kernel_class("loop_fusion_3")
      ('norm', 'other')
    """
    for found, pattern in _BY_NAME:
        if re.search(pattern, name, re.IGNORECASE):
            return found
    if not scopes:
        return "other"
    scope = scopes.get(re.sub(r"[.-]", "_", name))
    if scope is None:  # of another program of the step, and those sample
        return "sampling"
    return next((found for found, pattern in _BY_SCOPE if re.search(pattern, scope)), "other")
