# SPDX-License-Identifier: Apache-2.0
"""How a prompt changes for its items: placeholders put in, or in the place of something, and found
again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, ItemsView, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from vllm.multimodal.inputs import PlaceholderRange

if TYPE_CHECKING:
    import torch

    from vllm.tokenizers import TokenizerLike

PromptSeq: TypeAlias = str | list[int]
"""A text or token ids."""
_S = TypeVar("_S", str, list[int])


@dataclass
class PromptIndex:
    """A place in a prompt, found by its position."""

    get_match_index: Callable[[Any, PromptSeq, int], int | None]
    """(tokenizer, prompt, start index) -> index, or None if there is none from the start on."""


class PromptIndexTargets:
    """Places that need no text to be found by."""

    @staticmethod
    def start() -> PromptIndex:
        """Before everything, whatever was put in already."""
        return PromptIndex(lambda tokenizer, prompt, start_idx=0: 0 if start_idx == 0 else None)

    @staticmethod
    def prefix(seq: PromptSeq) -> PromptIndex:
        """Behind `seq`, if the prompt begins with it."""

        def get_match_index(tokenizer: Any, prompt: PromptSeq, start_idx: int = 0) -> int | None:
            prefix = _as_kind_of(prompt, seq, tokenizer)
            is_there = start_idx == 0 and prompt[: len(prefix)] == prefix
            return len(prefix) if is_there else None

        return PromptIndex(get_match_index)

    @staticmethod
    def end() -> PromptIndex:
        """Behind everything."""
        return PromptIndex(lambda tokenizer, prompt, start_idx=0: len(prompt))


UpdateTarget: TypeAlias = PromptSeq | PromptIndex
PromptUpdateTarget: TypeAlias = Callable[[int], UpdateTarget] | UpdateTarget
"""What to look for; or a function of the item's index."""


@dataclass
class PromptUpdateDetails(Generic[_S]):
    """What is put into the prompt, and which of its tokens take embeddings (None: all)."""

    full: _S
    is_embed: Callable[[TokenizerLike | None, PromptSeq], torch.Tensor] | None = None

    @staticmethod
    def from_seq(seq: _S) -> PromptUpdateDetails[_S]:
        """All of its tokens take embeddings."""
        return PromptUpdateDetails(full=seq)

    @staticmethod
    def select_text(seq: _S, embed_text: str) -> PromptUpdateDetails[_S]:
        """Those tokens that `embed_text` is made of."""

        def is_embed(tokenizer: TokenizerLike | None, full: PromptSeq) -> torch.Tensor:
            return _is_one_of(_token_ids(tokenizer, full), _token_ids(tokenizer, embed_text))

        return PromptUpdateDetails(full=seq, is_embed=is_embed)

    @staticmethod
    def select_token_id(seq: _S, embed_token_id: int) -> PromptUpdateDetails[_S]:
        """Tokens with that id."""
        return PromptUpdateDetails.select_token_ids(seq, [embed_token_id])

    @staticmethod
    def select_token_ids(seq: _S, embed_token_ids: list[int]) -> PromptUpdateDetails[_S]:
        """Tokens with one of these ids."""

        def is_embed(tokenizer: TokenizerLike | None, full: PromptSeq) -> torch.Tensor:
            return _is_one_of(_token_ids(tokenizer, full), embed_token_ids)

        return PromptUpdateDetails(full=seq, is_embed=is_embed)


PromptUpdateInfo: TypeAlias = PromptSeq | PromptUpdateDetails
PromptUpdateContent: TypeAlias = Callable[[int], PromptUpdateInfo] | PromptUpdateInfo


class UpdateMode(str, Enum):
    """INSERT behind the target, or REPLACE it."""

    INSERT = "insert"
    REPLACE = "replace"


@dataclass
class PromptUpdate(ABC):
    """A change for each item of a modality."""

    modality: str
    target: PromptUpdateTarget

    @property
    @abstractmethod
    def content(self) -> PromptUpdateContent:
        """What is put in."""

    @property
    @abstractmethod
    def mode(self) -> UpdateMode:
        """How."""

    def resolve(self, item_idx: int) -> ResolvedPromptUpdate:
        """The change for one item."""
        target = self.target(item_idx) if callable(self.target) else self.target
        content = self.content(item_idx) if callable(self.content) else self.content
        if not isinstance(content, PromptUpdateDetails):
            content = PromptUpdateDetails.from_seq(content)
        return ResolvedPromptUpdate(self.modality, item_idx, self.mode, target, content)


@dataclass
class PromptInsertion(PromptUpdate):
    """Puts `insertion` behind the target."""

    insertion: PromptUpdateContent = field(repr=False)

    @property
    def content(self) -> PromptUpdateContent:
        return self.insertion

    @property
    def mode(self) -> UpdateMode:
        return UpdateMode.INSERT


@dataclass
class PromptReplacement(PromptUpdate):
    """Puts `replacement` in the place of the target."""

    replacement: PromptUpdateContent = field(repr=False)

    @property
    def content(self) -> PromptUpdateContent:
        return self.replacement

    @property
    def mode(self) -> UpdateMode:
        return UpdateMode.REPLACE


class _HasModality(Protocol):
    modality: str


_M = TypeVar("_M", bound=_HasModality)


def full_groupby_modality(values: Iterable[_M]) -> ItemsView[str, list[_M]]:
    """Values by modality, wherever they stand."""
    groups: dict[str, list[_M]] = defaultdict(list)
    for value in values:
        groups[value.modality].append(value)
    return groups.items()


class PromptTargetMatch(NamedTuple):
    """A target found: [start_idx, end_idx) of the prompt."""

    start_idx: int
    end_idx: int


@dataclass(frozen=True)
class ResolvedPromptUpdate:
    """The change for one item."""

    modality: str
    item_idx: int
    mode: UpdateMode
    target: UpdateTarget
    content: PromptUpdateDetails = field(repr=False)

    def iter_token_matches(
        self, prompt: list[int], tokenizer: TokenizerLike | None, *, start_idx: int = 0
    ) -> Generator[PromptTargetMatch]:
        """Where the target stands among token ids."""
        yield from self._matches(prompt, tokenizer, start_idx)

    def iter_text_matches(
        self, prompt: str, tokenizer: TokenizerLike | None, *, start_idx: int = 0
    ) -> Generator[PromptTargetMatch]:
        """Where the target stands in a text."""
        yield from self._matches(prompt, tokenizer, start_idx)

    def iter_matches(
        self, prompt: list[int] | str, tokenizer: TokenizerLike | None, *, start_idx: int = 0
    ) -> Generator[PromptTargetMatch]:
        """Where the target stands in either."""
        yield from self._matches(prompt, tokenizer, start_idx)

    def _matches(
        self, prompt: PromptSeq, tokenizer: TokenizerLike | None, start_idx: int
    ) -> Generator[PromptTargetMatch]:
        if isinstance(self.target, PromptIndex):
            index = self.target.get_match_index(tokenizer, prompt, start_idx)
            if index is not None:
                yield PromptTargetMatch(index, index)
            return
        target = _as_kind_of(prompt, self.target, tokenizer)
        yield from _iter_matches(prompt, target, start_idx)

    def with_target(self, target: UpdateTarget) -> ResolvedPromptUpdate:
        """A copy with another target."""
        return replace(self, target=target)

    def with_content(self, content: PromptUpdateInfo) -> ResolvedPromptUpdate:
        """A copy with another content."""
        if not isinstance(content, PromptUpdateDetails):
            content = PromptUpdateDetails.from_seq(content)
        return replace(self, content=content)


MultiModalPromptUpdates: TypeAlias = Mapping[str, list[Sequence[ResolvedPromptUpdate]]]
"""By modality, for each item the changes of which the first that matches is made."""
MultiModalPromptUpdatesApplyResult: TypeAlias = Mapping[str, list[int | None]]
"""By modality, for each item the index of the change that was made."""


def iter_token_matches(
    token_ids: list[int], match_ids: list[int], *, start_idx: int = 0
) -> Generator[PromptTargetMatch]:
    """Where `match_ids` stand among `token_ids`, without overlaps. Nothing matches nothing."""
    yield from _iter_matches(token_ids, match_ids, start_idx)


def replace_token_matches(
    token_ids: list[int], match_ids: list[int], new_ids: list[int]
) -> list[int]:
    """`token_ids` with each `match_ids` replaced."""
    out: list[int] = []
    done = 0
    for match in iter_token_matches(token_ids, match_ids):
        out += [*token_ids[done : match.start_idx], *new_ids]
        done = match.end_idx
    return out + token_ids[done:]


@dataclass
class PlaceholderFeaturesInfo:
    """An item's placeholder in a prompt of token ids."""

    modality: str
    item_idx: int
    start_idx: int
    tokens: list[int]
    is_embed: torch.Tensor | None

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.tokens)

    def to_range(self) -> PlaceholderRange:
        """As the engine takes it."""
        return PlaceholderRange(self.start_idx, self.length, self.is_embed)


def apply_token_matches(
    prompt: list[int], mm_prompt_updates: MultiModalPromptUpdates, tokenizer: TokenizerLike | None
) -> tuple[list[int], MultiModalPromptUpdatesApplyResult]:
    """Makes the changes, from left to right, each item's once; and which were made."""
    pieces, result = _apply_matches(prompt, mm_prompt_updates, tokenizer)
    return [token for piece in pieces for token in piece], result


def apply_text_matches(
    prompt: str, mm_prompt_updates: MultiModalPromptUpdates, tokenizer: TokenizerLike | None
) -> tuple[str, MultiModalPromptUpdatesApplyResult]:
    """As `apply_token_matches`, in a text."""
    pieces, result = _apply_matches(prompt, mm_prompt_updates, tokenizer)
    return "".join(pieces), result


def _apply_matches(
    prompt: _S, updates: MultiModalPromptUpdates, tokenizer: TokenizerLike | None
) -> tuple[list[_S], MultiModalPromptUpdatesApplyResult]:
    pieces: list[_S] = []
    result: dict[str, list[int | None]] = {m: [None] * len(i) for m, i in updates.items()}
    done = 0
    while (found := _next_match(prompt, updates, result, tokenizer, done)) is not None:
        match, update, index = found
        keeps = update.mode is UpdateMode.INSERT
        pieces.append(prompt[done : match.end_idx if keeps else match.start_idx])
        pieces.append(_as_kind_of(prompt, update.content.full, tokenizer))
        result[update.modality][update.item_idx] = index
        done = match.end_idx
    pieces.append(prompt[done:])
    return pieces, result


def _next_match(
    prompt: PromptSeq,
    updates: MultiModalPromptUpdates,
    result: Mapping[str, list[int | None]],
    tokenizer: TokenizerLike | None,
    start_idx: int,
) -> tuple[PromptTargetMatch, ResolvedPromptUpdate, int] | None:
    """The leftmost match from `start_idx` on, of the items without a change; of equal ones that of
    the first item, and of its first change."""
    best: tuple[PromptTargetMatch, ResolvedPromptUpdate, int] | None = None
    for modality, items in updates.items():
        for made, alternatives in zip(result[modality], items, strict=True):
            if made is not None:
                continue
            for index, update in enumerate(alternatives):
                matches = update.iter_matches(prompt, tokenizer, start_idx=start_idx)
                match = next((m for m in matches if m.start_idx >= start_idx), None)
                if match is not None and (best is None or match.start_idx < best[0].start_idx):
                    best = match, update, index
    return best


def find_mm_placeholders(
    prompt: list[int], mm_prompt_updates: MultiModalPromptUpdates, tokenizer: TokenizerLike | None
) -> Mapping[str, list[PlaceholderFeaturesInfo]]:
    """The placeholders that the items' changes left in a prompt, from left to right, by modality."""
    found: dict[str, list[PlaceholderFeaturesInfo]] = {m: [] for m in mm_prompt_updates}
    contents = {
        modality: [
            [(_token_ids(tokenizer, u.content.full), u.content.is_embed) for u in alternatives]
            for alternatives in items
        ]
        for modality, items in mm_prompt_updates.items()
    }
    position = 0
    while position < len(prompt):
        info = _placeholder_at(prompt, position, contents, found, tokenizer)
        if info is None:
            position += 1
            continue
        found[info.modality].append(info)
        position += info.length
    return {modality: infos for modality, infos in found.items() if infos}


def _placeholder_at(
    prompt: list[int],
    position: int,
    contents: Mapping[str, list[list[tuple[list[int], Any]]]],
    found: Mapping[str, list[PlaceholderFeaturesInfo]],
    tokenizer: TokenizerLike | None,
) -> PlaceholderFeaturesInfo | None:
    for modality, items in contents.items():
        item_idx = len(found[modality])
        if item_idx == len(items):
            continue
        for tokens, is_embed in items[item_idx]:
            if tokens and prompt[position : position + len(tokens)] == tokens:
                mask = None if is_embed is None else is_embed(tokenizer, tokens)
                return PlaceholderFeaturesInfo(modality, item_idx, position, tokens, mask)
    return None


def _iter_matches(
    prompt: PromptSeq, target: PromptSeq, start_idx: int
) -> Generator[PromptTargetMatch]:
    size = len(target)
    if not size:
        return
    position = start_idx
    while position <= len(prompt) - size:
        if prompt[position : position + size] == target:
            yield PromptTargetMatch(position, position + size)
            position += size
        else:
            position += 1


def _as_kind_of(prompt: _S, seq: PromptSeq, tokenizer: TokenizerLike | None) -> _S:
    """`seq` as a text or as token ids, whichever `prompt` is."""
    if isinstance(prompt, list):
        return _token_ids(tokenizer, seq)
    if isinstance(seq, str):
        return seq
    return _required(tokenizer).decode(seq)


def _token_ids(tokenizer: TokenizerLike | None, seq: PromptSeq) -> list[int]:
    if not isinstance(seq, str):
        return seq
    return _required(tokenizer).encode(seq, add_special_tokens=False)


def _required(tokenizer: TokenizerLike | None) -> TokenizerLike:
    if tokenizer is None:
        raise ValueError("a placeholder given as text needs a tokenizer, and the engine has none")
    return tokenizer


def _is_one_of(token_ids: Sequence[int], wanted: Iterable[int]) -> torch.Tensor:
    import torch

    wanted = set(wanted)
    return torch.tensor([token in wanted for token in token_ids], dtype=torch.bool)
