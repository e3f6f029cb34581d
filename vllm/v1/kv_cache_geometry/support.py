# SPDX-License-Identifier: Apache-2.0
"""All that this package needs from outside, so that it can also be packaged by itself."""

from vllm.utils.math_utils import cdiv, exact_div
from vllm.utils.torch_utils import dtype_name, get_dtype_size, str_dtype_to_torch_dtype

__all__ = ["cdiv", "dtype_name", "exact_div", "get_dtype_size", "str_dtype_to_torch_dtype"]
