# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with a platform: a name for each fault, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

ADVICE = {
    "PLATFORM_ATTRIBUTE": "set it on the class; vLLM reads it before anything runs",
    "HOOK_UNKNOWN": "rename it; a method of this name overrides nothing and is never called",
    "HOOK_KIND": "decorate it as the base class does",
    "HOOK_SIGNATURE": "take the parameters of the base class, by the same names",
    "HOOK_RAISES": "answer, or leave the hook to its default",
    "HOOK_VALUE": "return what the base class documents",
    "HOOK_DEVICE_INDEX": "look the number up in device_control_env_var, or leave it to the default",
    "BINDING_ANSWER": "do nothing to accept several KV caches of one layer index; raise "
    "NotImplementedError to refuse them",
    "BINDING_CACHE": "bind each layer's cache by its name, never by its index",
    "BACKEND": "name an importable subclass of AttentionBackend that has this method",
    "LAYOUT_DECLARED": "make shape, stride order and block dimension of the backend agree",
    "LAYOUT_SHAPE": "make the cache in the shape of the backend's get_kv_cache_shape",
    "LAYOUT_ORDER": "lay the cache out in memory as get_kv_cache_stride_order says, or declare the "
    "order that is used",
    "LAYOUT_BYTES": "address the cache by the strides of the view; do not view or reshape it",
    "ALIGNMENT_PAGES": "align views of groups that share an allocation (_reshape_kv_cache with the "
    "kv_cache_config), or choose one backend for both",
    "ALIGNMENT_STRIDES": "align by the roles of dimensions, not by their sizes",
    "ALIGNMENT_CRASH": "refuse with a ValueError that names the layers and what to set",
    "MODEL_START": "see the engine's error; a platform that cannot serve such a model refuses it in "
    "verify_model_arch",
    "MODEL_TOKENS": "compare attention, slots and positions with those of Transformers",
    "MODEL_CRASH": "run the model alone under a debugger; the process died, or hung and was killed "
    "(--vllm-kit-timeout)",
    "MODEL_RAISES": "look at the place named; the engine had started",
    "PROBE_RAISES": "look at the place named: if it is the kit's, the kit does not know such caches; "
    "its tokens were looked at all the same",
    "CONNECTOR_REGIONS": "hand register_kv_caches the very tensors that layers are bound to",
    "CONNECTOR_PAGES": "register by the backend's block dimension, not by the first one",
    "CONNECTOR_START": "make the engine start with a KV connector, or refuse one in "
    "check_and_update_config",
    "BLOCK_SIZE_DECLARED": "list in get_supported_kernel_block_sizes only what the shape allows",
    "BLOCK_SIZE_TOKENS": "refuse the size in get_supported_kernel_block_sizes or "
    "check_and_update_config, or compute slots from the block size",
    "BLOCK_SIZE_UNCLEAR": "refuse with a ValueError that says which block sizes are supported",
    "STALE_BYTES": "mask K and V behind the end of a request, also V (0 * NaN is NaN)",
}


@dataclass(frozen=True)
class Finding:
    """A fault: its code, whose it is, what is wrong."""

    code: str
    subject: str
    what: str

    def __post_init__(self) -> None:
        if self.code not in ADVICE:
            raise KeyError(f"no finding is called {self.code}")

    @property
    def line(self) -> str:
        """One line: code, subject, what is wrong, what to do."""
        what = " ".join(self.what.split()).rstrip(".")
        return f"{self.code} {self.subject}: {what}. To do: {ADVICE[self.code]}"
