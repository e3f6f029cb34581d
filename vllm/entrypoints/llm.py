# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a model in a program, without a server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm.beam_search import BeamSearchOutput, output_of
from vllm.config import AttentionConfig, CompilationConfig, ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.encoder_chat import chat_prompts
from vllm.entrypoints.llm_inputs import (
    Message,
    conversations_of,
    one_each,
    prompts_of,
    with_text_content,
)
from vllm.inputs import PromptType, TokensPrompt
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.utils.startup_timer import startup_timer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Metric

if TYPE_CHECKING:
    from torch import nn

    from vllm.v1.sample.logits_processor import LogitsProcessor

logger = init_logger(__name__)

UseTqdm = bool | Callable[..., tqdm]


class LLM:
    """Generates text for batches of prompts.

    `LLM()` runs the embedded model, `LLM("DIR")` or `LLM("FILE.gguf")` another. Every further
    keyword is an argument of `EngineArgs`, under the name of its flag.

    Raises:
        ValueError: the model or an argument cannot be served; says what to change.
    """

    def __init__(
        self,
        model: str = ModelConfig.model,
        *,
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        chat_template: Path | str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.92,
        enforce_eager: bool = False,
        hf_token: bool | str | None = None,
        hf_overrides: dict[str, Any] | None = None,
        attention_config: dict[str, Any] | AttentionConfig | None = None,
        kv_cache_memory_bytes: int | None = None,
        compilation_config: dict[str, Any] | CompilationConfig | None = None,
        logits_processors: list[str | type[LogitsProcessor]] | None = None,
        **kwargs: Any,
    ) -> None:
        known = EngineArgs.__dataclass_fields__
        unknown = sorted(set(kwargs) - set(known))
        if unknown:
            raise TypeError(
                f"LLM() has no argument {', '.join(unknown)}; it takes those of EngineArgs: "
                f"{', '.join(known)}"
            )
        # Nobody watches a program's log line of statistics, unless they ask for it.
        kwargs.setdefault("disable_log_stats", True)
        engine_args = EngineArgs(
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=quantization,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            hf_token=hf_token,
            hf_overrides=hf_overrides or {},
            attention_config=attention_config,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            compilation_config=compilation_config,
            logits_processors=logits_processors,
            **kwargs,
        )
        self._start(engine_args, chat_template)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """From arguments that are put together already."""
        llm = cls.__new__(cls)
        llm._start(engine_args, None)
        return llm

    def _start(self, engine_args: EngineArgs, chat_template: Path | str | None) -> None:
        with startup_timer.phase("engine"):
            self.llm_engine = LLMEngine.from_engine_args(engine_args)
        self.model_config = self.llm_engine.model_config
        self.chat_template = _read_template(chat_template)
        self._default_sampling_params: dict[str, Any] | None = None
        self._request_ids = itertools.count()
        # Requests under way, in the order they were added, and those of them that have ended.
        self._enqueued: list[str] = []
        self._ended: dict[str, RequestOutput] = {}
        logger.debug("%s", startup_timer.table())

    def get_tokenizer(self) -> TokenizerLike:
        """The model's tokenizer.

        Raises:
            ValueError: none was loaded.
        """
        return self.llm_engine.get_tokenizer()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Workers of the engine. `include_dp`: count its copies too; there is one."""
        return self.llm_engine.vllm_config.parallel_config.world_size

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults, from its generation_config."""
        if self._default_sampling_params is None:
            self._default_sampling_params = self.model_config.get_diff_sampling_param()
        return SamplingParams.from_optional(**self._default_sampling_params)

    # Generation

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The completions of each prompt, in the order of the prompts.

        All prompts are checked before any is run. A request that fails on the way has
        finish_reason "error"; the reason is logged.

        Args:
            sampling_params: for all prompts, or one for each; None: the model's defaults.
            use_tqdm: show progress, or a function that makes the progress bar.
            priority: one for each prompt; lower ones go first under --scheduling-policy priority.

        Raises:
            ValueError: a prompt or parameters cannot be served; nothing was run.
        """
        self._refuse_if_enqueued("generate")
        self._add(prompts, sampling_params, priority, tokenization_kwargs)
        return self.wait_for_completion(use_tqdm=use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: list[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """As `generate`, but only adds the requests: `wait_for_completion` runs them. Returns their
        ids."""
        return self._add(prompts, sampling_params, priority, tokenization_kwargs)

    def wait_for_completion(
        self,
        output_type: type[Any] | tuple[type[Any], ...] | None = None,
        *,
        use_tqdm: UseTqdm = True,
    ) -> list[RequestOutput]:
        """Runs all that was enqueued; outputs in the order of `enqueue`.

        Raises:
            TypeError: an output is no `output_type`.
        """
        outputs = self._run(use_tqdm)
        if output_type is not None and not all(isinstance(o, output_type) for o in outputs):
            raise TypeError(f"the outputs are RequestOutput, not {output_type}")
        return outputs

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
        *,
        sampling_params: SamplingParams | None = None,
    ) -> list[BeamSearchOutput]:
        """The best sequences of each prompt, as Transformers' `generate(num_beams=beam_width)`
        finds them.

        Args:
            concurrency_limit: prompts that are searched at once; None: as many as there is room for.
            sampling_params: what is forbidden, biased or penalised, and further tokens that end a
                sequence; None: the model's defaults.

        Raises:
            ValueError: a prompt or parameters cannot be served; nothing was run.
        """
        self._refuse_if_enqueued("beam_search")
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, not {type(params).__name__}")
        if params.temperature:
            logger.warning_once("temperature has no effect on a beam search")
        base = self.get_default_sampling_params() if sampling_params is None else sampling_params
        searching = base.for_beam_search(params)
        if searching.logprobs is None:
            searching.logprobs = 2 * params.beam_width
        prompts = prompts_of(prompts)
        limit = max(len(prompts), 1) if concurrency_limit is None else concurrency_limit
        if type(limit) is not int or limit < 1:
            raise ValueError(f"concurrency_limit must be an integer of at least 1, not {limit!r}")
        outputs: list[RequestOutput] = []
        for begin in range(0, len(prompts), limit):
            self._add(prompts[begin : begin + limit], searching, None, None)
            outputs += self.wait_for_completion(use_tqdm=use_tqdm)
        return [output_of(output, params) for output in outputs]

    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The answers to conversations: one, or a list of them.

        Args:
            messages: OpenAI's: dicts with `role` and `content` (a text, or a list of text parts; for
                a model that reads images also of image_url and image_pil parts).
            chat_template: takes the place of the model's; may name one of several.
            add_generation_prompt: let the model answer, rather than go on with the last message.
            continue_final_message: go on with the last message (needs add_generation_prompt=False).
            tools: descriptions of functions, for templates that know them.

        Raises:
            ValueError: a conversation cannot be rendered or served; nothing was run.
        """
        self._refuse_if_enqueued("chat")
        self.enqueue_chat(
            messages,
            sampling_params,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.wait_for_completion(use_tqdm=use_tqdm)

    def enqueue_chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        priority: list[int] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """As `chat`, but only adds the requests; returns their ids."""
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message goes on with the last message; pass "
                "add_generation_prompt=False with it"
            )
        conversations = conversations_of(messages)
        tokenizer = self.get_tokenizer()
        encoder_decoder = self.llm_engine.input_processor.encoder_decoder
        if encoder_decoder is not None:
            if tools:
                raise ValueError("tools are not supported by encoder-decoder models")
            prompts, tokenization_kwargs = chat_prompts(
                encoder_decoder,
                self.model_config.allowed_media_domains,
                conversations,
                tokenizer,
                chat_template=chat_template or self.chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
            )
            return self._add(prompts, sampling_params, priority, tokenization_kwargs)
        prompts = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                [with_text_content(message) for message in conversation],
                tools=tools,
                chat_template=chat_template or self.chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
            # The template wrote the special tokens itself.
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append(TokensPrompt(prompt_token_ids=token_ids, prompt=text))
        return self._add(prompts, sampling_params, priority, None)

    def _add(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: list[int] | None,
        tokenization_kwargs: dict[str, Any] | None,
    ) -> list[str]:
        prompts = prompts_of(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        all_params = one_each("sampling_params", sampling_params, len(prompts), SamplingParams)
        priorities = one_each("priority", 0 if priority is None else priority, len(prompts), int)
        made: list[tuple[EngineCoreRequest, str | None]] = []
        for index, prompt in enumerate(prompts):
            params = all_params[index].clone()
            params.output_kind = RequestOutputKind.FINAL_ONLY
            try:
                made.append(
                    self.llm_engine.input_processor.process_inputs(
                        str(next(self._request_ids)),
                        prompt,
                        params,
                        tokenization_kwargs=tokenization_kwargs,
                        priority=priorities[index],
                    )
                )
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        ids = [request.external_req_id for request, _ in made]
        self._enqueued.extend(ids)
        for request, text in made:
            self.llm_engine.add_request(
                request.external_req_id, request, request.sampling_params, prompt_text=text
            )
        return ids

    def _refuse_if_enqueued(self, method: str) -> None:
        if self._enqueued:
            raise RuntimeError(
                f"{len(self._enqueued)} enqueued requests wait: call wait_for_completion before "
                f"{method}"
            )

    def _run(self, use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Steps until all is done. Whatever comes between, nothing is left behind: not for the next
        call, and not in the engine."""
        try:
            with _Progress(use_tqdm, len(self._enqueued)) as progress:
                while self.llm_engine.has_unfinished_requests():
                    for output in self.llm_engine.step():
                        if output.finished:
                            self._ended[output.request_id] = output
                            progress.update(output)
            return [self._ended[request_id] for request_id in self._enqueued]
        except BaseException:
            self.llm_engine.abort_request(self._enqueued)
            raise
        finally:
            self._enqueued, self._ended = [], {}

    # Commands

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empties the prefix cache; False if requests that run keep it in use."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls `method` (a worker's, by name, or a function of the worker) on every worker.

        Raises:
            TypeError: a function, where the workers are in another process.
        """
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        """Calls `func` with every worker's model.

        Raises:
            TypeError: the workers are in another process.
        """
        return self.llm_engine.apply_model(func)

    def get_metrics(self) -> list[Metric]:
        """The Prometheus metrics as they are now; needs `disable_log_stats=False`.

        Raises:
            ValueError: statistics are off.
        """
        return self.llm_engine.get_metrics()


class _Progress:
    """The progress bar, with speeds in tokens."""

    def __init__(self, use_tqdm: UseTqdm, total: int) -> None:
        self._bar: tqdm | None = None
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._num_input = self._num_output = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, output: RequestOutput) -> None:
        """Counts a request that has ended."""
        if self._bar is None:
            return
        self._num_input += len(output.prompt_token_ids or ()) * len(output.outputs)
        self._num_output += sum(len(one.token_ids) for one in output.outputs)
        elapsed_s = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"est. speed input: {self._num_input / elapsed_s:.2f} toks/s, "
            f"output: {self._num_output / elapsed_s:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(1)


def _read_template(chat_template: Path | str | None) -> str | None:
    """A template's text: it may be given itself, or its file."""
    if chat_template is None:
        return None
    is_file = isinstance(chat_template, Path) or (
        not {"{", "\n"} & set(chat_template) and Path(chat_template).is_file()
    )
    return Path(chat_template).read_text(encoding="utf-8") if is_file else str(chat_template)
