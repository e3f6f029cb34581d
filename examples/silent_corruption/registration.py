# SPDX-License-Identifier: Apache-2.0
"""What the NIXL connector would send for page 1 of the caches of views.py; the same arguments."""

import json
import tempfile
from unittest.mock import MagicMock

import vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker as base
from views import backends, caches, config, heads, names, page_dims, raw, spec
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

# In NIXL's place: it hears what is asked, and nothing is sent.
base.NixlWrapper = base.nixl_agent_config = MagicMock()
base.NixlWrapper.return_value.get_agent_metadata.return_value = b""
model = tempfile.mkdtemp()
shape = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": heads, "head_dim": 128}
with open(f"{model}/config.json", "w") as file:
    json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}, file)
nixl = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu")
engine = EngineArgs(model, skip_tokenizer_init=True, dtype="bfloat16", kv_transfer_config=nixl)
vllm_config = engine.create_engine_config()
vllm_config.cache_config.block_size = 16
for name, backend in zip(names, backends):
    layer = MagicMock(spec=AttentionLayerBase, get_attn_backend=lambda b=backend: b)
    vllm_config.compilation_config.static_forward_context[name] = layer
with set_current_vllm_config(vllm_config):
    parallel_state.init_distributed_environment(1, 0, f"file://{model}/rendezvous", 0, "gloo")
    parallel_state.ensure_model_parallel_initialized(1, 1)
    worker = NixlConnectorWorker(vllm_config, "engine", config)
    worker.register_kv_caches(caches)

runs = worker.nixl_wrapper.get_xfer_descs.call_args.args[0]  # Address and bytes, by number.
for group, name in enumerate(names):
    raw.zero_()
    caches[name].select(page_dims[group], 1).fill_(1.0)  # Both bytes of it differ from zero.
    pages = [[1] if number == group else [] for number in range(2)]
    sent = [runs[int(i)] for i in worker._compute_desc_ids(pages, 3, None, 1)]
    starts = [(int(run[0]) - raw.data_ptr(), int(run[1])) for run in sent]
    right = sum(int(raw[start : start + size].count_nonzero()) for start, size in starts)
    total = sum(size for _, size in starts)
    others = total - right
    print(f"{name}: of {spec.page_size_bytes} bytes {right} are sent, and {others} of others")
