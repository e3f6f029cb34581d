# SPDX-License-Identifier: Apache-2.0
"""The model runner: one for every device.

A step: forget and take up requests, prepare the batch, forward, sample. `execute_model` does all
but the sampling, which `sample_tokens` does; between them lies `ExecuteModelState`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, LogprobsLists, ModelRunnerOutput, RequestFailure
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.worker.gpu.attn_utils import (
    build_slot_mappings_by_layer,
    get_kv_cache_spec,
    init_attn_backend,
    init_kv_cache,
    max_encoder_tokens_per_step,
)
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import (
    make_graph_manager,
    reasons_against_graphs,
    report_no_graphs,
)
from vllm.v1.worker.gpu.encoder_runner import encoder_failure
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBatchBuilder
from vllm.v1.worker.gpu.kv_connector import (
    NoKVConnector,
    apply_required_layout,
    make_kv_connector,
)
from vllm.v1.worker.gpu.kv_cache_pages import KVCachePages
from vllm.v1.worker.gpu.model_states import init_model_state
from vllm.v1.worker.gpu.sample.prompt_logprobs import PromptLogprobs
from vllm.v1.worker.gpu.sample.sampler import NOTHING_TO_TAKE, Sampler
from vllm.v1.worker.gpu.states import RequestState

logger = init_logger(__name__)


class ExecuteModelState(NamedTuple):
    """What `execute_model` leaves for `sample_tokens`. hidden_states: (num_tokens, hidden)."""

    input_batch: InputBatch
    hidden_states: torch.Tensor
    kv_connector_output: KVConnectorOutput | None


class GPUModelRunner:
    """Runs the model of `vllm_config` on `device`. The name is upstream's; the device is any."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.kv_caches: list[torch.Tensor] = []
        self.kv_connector = NoKVConnector()
        self._pending: ExecuteModelState | None = None
        self._failures: dict[str, RequestFailure] = {}
        self._forward: Callable[[InputBatch, SchedulerOutput], torch.Tensor] = self._run_eagerly
        self._logits: Callable[[torch.Tensor, InputBatch], torch.Tensor] = self._compute_logits

    # Start

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Makes the model and reads its weights."""
        self.model = get_model(vllm_config=self.vllm_config)
        self.model_state = init_model_state(self.vllm_config, self.model, self.device)

    def get_model(self) -> nn.Module:
        """The model."""
        return self.model

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each layer needs of the KV cache per page."""
        return get_kv_cache_spec(self.vllm_config)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Makes the caches, and everything whose size depends on them or on `max_model_len`."""
        config = self.vllm_config
        max_model_len = config.model_config.max_model_len
        self.kv_cache_config = kv_cache_config
        self.attn_groups, self.kernel_block_sizes = init_attn_backend(
            kv_cache_config, config, self.device
        )
        apply_required_layout(config)
        kv_caches = init_kv_cache(
            self.kv_caches,
            config.compilation_config.static_forward_context,
            kv_cache_config,
            self.attn_groups,
            self.device,
            config.cache_config.cache_dtype,
            self.kernel_block_sizes,
            config,
        )
        self.kv_connector = make_kv_connector(config, kv_cache_config, kv_caches)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.block_tables = BlockTables(
            [spec.block_size for spec in specs],
            self.max_num_reqs,
            [spec.max_num_blocks_per_req(config, max_model_len) for spec in specs],
            self.kernel_block_sizes,
            frozenset(i for i, spec in enumerate(specs) if isinstance(spec, CrossAttentionSpec)),
        )
        self.pages = KVCachePages(config, kv_cache_config, self.attn_groups, self.kernel_block_sizes)
        self.states = RequestState(self.max_num_reqs, max_model_len)
        pin_memory = current_platform.is_pin_memory_available()
        self.sampler = Sampler(
            self.max_num_reqs,
            config.model_config.seed,
            self.device,
            build_logitsprocs(config, self.device, pin_memory),
        )
        self.prompt_logprobs = PromptLogprobs()
        self.batch_builder = InputBatchBuilder(
            self.max_num_reqs,
            self.max_num_tokens,
            self.block_tables,
            self.device,
            pin_memory=pin_memory,
            max_num_encoder_tokens=max_encoder_tokens_per_step(config, specs),
        )

    @torch.inference_mode()
    def profile_run(self, num_tokens: int | None = None, run_encoder: bool = True) -> None:
        """A forward pass without attention and a sampling step, of `num_tokens` tokens (as many as
        a step can have if left out): what memory is measured with and compiled code warmed by.

        Args:
            run_encoder: before that run the encoder, if there is one, over its largest inputs.
        """
        num_tokens = num_tokens or self.max_num_tokens
        with set_forward_context(None, self.vllm_config, num_tokens):
            inputs = self.model_state.prepare_dummy_inputs(
                self.max_num_reqs, num_tokens, run_encoder
            )
            hidden_states = self.model(**inputs)
        self.model.compute_logits(hidden_states[: min(num_tokens, self.max_num_reqs)])

    @torch.inference_mode()
    def capture_model(self) -> int:
        """Records graphs of decode steps, if the config asks for them; returns the bytes of the
        device that they take. Where the model cannot be recorded the log says why, and it runs
        without. Call before the first request, when the kernels are compiled.

        Raises:
            RuntimeError: recording failed.
        """
        if self.vllm_config.compilation_config.cudagraph_mode is CUDAGraphMode.NONE:
            return 0
        reasons = reasons_against_graphs(self.vllm_config, self.attn_groups, self.kv_connector)
        if reasons:
            report_no_graphs(self.vllm_config, reasons)
            return 0
        self.graphs = make_graph_manager(
            self.model_state, self.kv_cache_config, self.attn_groups, self.batch_builder
        )
        num_bytes = self.graphs.capture()
        self._forward, self._logits = self._replay_or_run, self.graphs.compute_logits
        return num_bytes

    # A step

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs the model over the step's tokens. None: call `sample_tokens` for the output."""
        self.kv_connector.handle_preemptions(scheduler_output)
        self._update_states(scheduler_output)
        self.pages.prepare(scheduler_output)
        self._failures = self._encode(scheduler_output)
        if self._failures:
            scheduler_output = scheduler_output.without(self._failures)
            self.kv_connector.discard(self._failures)
        if scheduler_output.total_num_scheduled_tokens == 0:
            output = self.kv_connector.run_without_tokens(scheduler_output)
            return replace(output, failures=self._failures) if self._failures else output
        batch = self.batch_builder.build(scheduler_output, self.states)
        hidden_states = self._forward(batch, scheduler_output)
        transferred = self.kv_connector.end(scheduler_output)
        self._pending = ExecuteModelState(batch, hidden_states, transferred)
        return None

    def _encode(self, scheduler_output: SchedulerOutput) -> dict[str, RequestFailure]:
        """Runs the encoder over the step's inputs. Returns the requests that have one of which it
        made nothing: those that were to encode it, and those that were to use its pages."""
        errors = self.model_state.execute_mm_encoder(scheduler_output.scheduled_encoder_inputs)
        return {
            request.req_id: encoder_failure(feature.modality, errors[feature.identifier])
            for request in (scheduler_output.scheduled_new_reqs if errors else ())
            for feature in request.mm_features
            if feature.identifier in errors
        }

    def _run_eagerly(self, batch: InputBatch, scheduler_output: SchedulerOutput) -> torch.Tensor:
        """The model's hidden states of `batch`: (num_tokens, hidden)."""
        metadata = self.model_state.prepare_attn(batch, self.attn_groups)
        slots = build_slot_mappings_by_layer(batch.slot_mappings, self.kv_cache_config)
        with set_forward_context(metadata, self.vllm_config, batch.num_tokens, slots):
            self.kv_connector.begin(scheduler_output)
            return self.model(**self.model_state.prepare_inputs(batch))

    def _replay_or_run(self, batch: InputBatch, scheduler_output: SchedulerOutput) -> torch.Tensor:
        """As `_run_eagerly`, from a graph where one was recorded for such a batch."""
        if not self.graphs.has_graph_for(batch):
            return self._run_eagerly(batch, scheduler_output)
        self.kv_connector.begin_alone(scheduler_output)
        return self.graphs.replay(batch)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: None = None) -> ModelRunnerOutput:
        """Samples after the tokens that `execute_model` ran. `grammar_output` is upstream's seam
        for structured output, which is not supported.

        Raises:
            RuntimeError: no step waits to be sampled.
        """
        if self._pending is None:
            raise RuntimeError("sample_tokens was called without a step; call execute_model first")
        (batch, hidden_states, transferred), self._pending = self._pending, None
        sampled: list[list[int]] = [[] for _ in batch.req_ids]
        logprobs = None
        if len(batch.sampling):
            logprobs = self._sample(batch, hidden_states, sampled)
        prompt_logprobs = self.prompt_logprobs.compute(
            batch, self.states, hidden_states, self.model.compute_logits
        )
        self.states.num_computed_tokens[batch.rows] += batch.num_scheduled_tokens
        return ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(batch.req_ids)},
            sampled_token_ids=sampled,
            logprobs=logprobs,
            prompt_logprobs_dict=prompt_logprobs,
            kv_connector_output=transferred,
            failures=self._failures,
        )

    def _sample(
        self, batch: InputBatch, hidden_states: torch.Tensor, sampled: list[list[int]]
    ) -> LogprobsLists | None:
        """Fills `sampled` for the requests that get a token; returns their logprobs."""
        logits = self._logits(hidden_states, batch)
        rows = batch.rows[batch.sampling]
        output = self.sampler(logits, rows, self.states)
        token_ids = output.sampled_token_ids.cpu().numpy()[:, 0]
        self.states.append_tokens(rows, token_ids)
        has_none = output.has_none.cpu().tolist()
        for i, token_id, is_none in zip(batch.sampling.tolist(), token_ids.tolist(), has_none):
            if is_none:
                self._failures[batch.req_ids[i]] = RequestFailure(NOTHING_TO_TAKE)
            else:
                sampled[i].append(token_id)
        if output.logprobs_tensors is None:
            return None
        first_row = np.zeros(batch.num_reqs + 1, dtype=np.int64)
        first_row[batch.sampling + 1] = 1
        return output.logprobs_tensors.tolists(np.cumsum(first_row)[:-1].tolist())

    def _compute_logits(self, hidden_states: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        return self.model.compute_logits(hidden_states.index_select(0, batch.logits_indices))

    # States

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids:
            self._remove_request(req_id)
        self.model_state.free_encoder_outputs(scheduler_output.free_encoder_mm_hashes)
        for request in scheduler_output.scheduled_new_reqs:
            self._add_request(request)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        ):
            row = self.states.req_id_to_index[req_id]
            self.states.num_computed_tokens[row] = num_computed_tokens
            if new_block_ids is not None:
                self.block_tables.append_block_ids(row, new_block_ids, overwrite=False)

    def _add_request(self, request: NewRequestData) -> None:
        params = request.sampling_params
        row = self.states.add_request(
            request.req_id,
            len(request.prompt_token_ids),
            request.prefill_token_ids or request.prompt_token_ids,
            request.num_computed_tokens,
            sum(feature.mm_position.get_num_embeds() for feature in request.mm_features),
        )
        self.block_tables.append_block_ids(row, request.block_ids, overwrite=True)
        self.sampler.add_request(row, request.req_id, params)
        resumed = len(request.prefill_token_ids or ()) > len(request.prompt_token_ids)
        wanted = None if resumed else params.prompt_logprobs
        self.prompt_logprobs.add_request(request.req_id, wanted)
        self.model_state.add_request(row, request)

    def _remove_request(self, req_id: str) -> None:
        self.states.remove_request(req_id)
        self.prompt_logprobs.remove_request(req_id)
        self.model_state.remove_request(req_id)

    def shutdown(self) -> None:
        """Stops the connector and lets go of the caches."""
        self.kv_connector.shutdown()
        self.kv_caches.clear()
