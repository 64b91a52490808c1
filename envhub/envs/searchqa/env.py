"""Deep search: questions to answer with a retriever, in the tags of Search-R1 and AgentGym."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from common.config.envs import EnvsSection
from common.errors import ConfigError
from envhub.conversations import CONVERSATIONS, begun
from envhub.env import (
    EnvSpec,
    Isolation,
    StepResult,
    Style,
    SubsetSpec,
    TaskSpec,
    parse_item,
    split_item,
)
from envhub.envs.searchqa import library
from envhub.envs.searchqa.library import Library
from envhub.envs.searchqa.passages import Passage, worded
from envhub.envs.searchqa.questions import Hop, SearchQuestion, agentgym_item
from envhub.envs.text_env import TextEnv
from envhub.tables import read_instructions, read_table
from envhub.tasks import load_tasks


class ActionTag(StrEnum):
    """The kinds of action, with the names of their tags."""

    SEARCH = "search"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class TaggedAction:
    """A search for `text`, or `text` as the final answer."""

    kind: ActionTag
    text: str


def tagged_action(text: str) -> TaggedAction | None:
    """Return the action of an agent's turn; None if there is none.

    The first closed <search> or <answer> decides the kind. If there are several answers, the last
    one counts. Tags are found by plain search, in time linear in the text, even if they are nested.
    """
    blocks = [(_first(text, kind), kind) for kind in ActionTag]
    closed = [(block, kind) for block, kind in blocks if block is not None]
    if not closed:
        return None
    (_, content), kind = min(closed)
    if kind is ActionTag.ANSWER:
        content = _last(text, kind)
    return TaggedAction(kind, content.strip())


def _first(text: str, kind: ActionTag, start: int = 0) -> tuple[int, str] | None:
    """Return position and content of the first closed block from `start` on."""
    opening_texts = f"<{kind}>"
    closing = f"</{kind}>"
    begin = text.find(opening_texts, start)
    if begin < 0:
        return None
    end = text.find(closing, begin + len(opening_texts))
    return None if end < 0 else (begin, text[begin + len(opening_texts) : end])


def _last(text: str, kind: ActionTag) -> str:
    """Return the content of the last block of a kind, "" for none."""
    start = 0
    content = ""
    while (block := _first(text, kind, start)) is not None:
        start = block[0] + 2 * len(kind) + 5 + len(block[1])
        content = block[1]
    return content


TEXTS = read_instructions(__file__)
_TABLE = read_table(__file__, "prompts.yaml")
WORDS: dict[Style, dict[str, str]] = {Style(name): each for name, each in _TABLE["words"].items()}


def opening_texts() -> dict[str, Any]:
    """Return the start of a conversation; AgentGym's style copies that of its clients."""
    return begun("searchqa", TEXTS)


def first_observation(question: SearchQuestion, style: Style) -> str:
    """Return the first observation, which is the question."""
    if style is Style.COMPACT:
        return f"question: {question.text}"
    return CONVERSATIONS["searchqa"].first_observation(question.text)


def verdict_text(style: Style, *, is_right: bool, is_retry: bool) -> str:
    """Return the observation after an answer."""
    words = WORDS[style]
    if is_right:
        return words["right"]
    return words["wrong"] + (words["again"] if is_retry else "")


ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Return `text` in lower case without punctuation, articles and surplus spaces.

    A text of nothing else, such as "The", is only changed to lower case, so that an empty answer
    never equals it. SQuAD has no such exception.

    Source: SQuAD's evaluation, arXiv 1606.05250.
    """
    bare = ARTICLES.sub(" ", text.lower().translate(PUNCTUATION))
    return " ".join(bare.split()) or " ".join(text.lower().split())


def exact_match(answer: str, golden_answers: Sequence[str]) -> float:
    """Return 1 if the answer equals any golden answer after normalisation, else 0."""
    normalised = normalise(answer)
    return float(any(normalised == normalise(golden) for golden in golden_answers))


def f1(answer: str, golden_answers: Sequence[str]) -> float:
    """Return the best F1 in [0, 1] of the answer's words over the golden answers.

    Yes, no and "noanswer" cannot match in part: they count only as a whole.

    Source: HotpotQA's evaluation, arXiv 1809.09600.
    """
    return max(
        (_f1(normalise(answer), normalise(golden)) for golden in golden_answers), default=0.0
    )


def _f1(answer: str, golden: str) -> float:
    """Return the F1 of the words of two normalised answers."""
    if answer == golden:
        return 1.0
    whole = ("yes", "no", "noanswer")
    if answer in whole or golden in whole:
        return 0.0
    answer_words = answer.split()
    golden_words = golden.split()
    num_same = sum((Counter(answer_words) & Counter(golden_words)).values())
    if num_same == 0:
        return 0.0
    precision = num_same / len(answer_words)
    recall = num_same / len(golden_words)
    return 2 * precision * recall / (precision + recall)


GRADES = {"em": exact_match, "f1": f1}


SESSIONS_PER_WORKER = 256
MAX_QUERY_CHARS = 2000


class SearchqaEnv(TextEnv):
    """One question. An answer ends the episode; with `retry`, only a right answer does.

    The reward is that of the last action: the grade of an answer, 0 for anything else.
    """

    def __init__(self, style: Style, shared: Library, subsets: Mapping[str, SubsetSpec]) -> None:
        super().__init__(style)
        self._shared = shared
        self._subsets = subsets

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: nothing is random."""
        item = parse_item(item_id, self._subsets)
        self._question = self._shared.bank().question(item)
        self._retriever = self._shared.retriever()
        self._begin()
        self._found: list[Passage] = []
        self._asked: dict[str, None] = {}
        return first_observation(self._question, self._style)

    def _step(self, action: str) -> StepResult:
        """Search or grade an answer; any other text is invalid."""
        wanted = tagged_action(action)
        if wanted is None:
            observation = WORDS[self._style]["invalid"]
            return StepResult(observation=observation, reward=0.0, done=False, is_valid=False)
        if wanted.kind is ActionTag.SEARCH:
            observation = self._search(wanted.text[:MAX_QUERY_CHARS])
            return StepResult(observation=observation, reward=0.0, done=False, is_valid=True)
        return self._answer(wanted.text)

    def _search(self, query: str) -> str:
        """Return the search results as text, and keep the found passages."""
        passages = self._retriever.search(query, self._shared.options.num_passages)
        self._asked[query] = None
        self._found += [passage for passage in passages if passage not in self._found]
        return worded(passages, self._style)

    def _answer(self, text: str) -> StepResult:
        """Grade an answer."""
        options = self._shared.options
        golden = self._question.golden_answers
        is_right = exact_match(text, golden) == 1.0
        self._done = is_right or not options.retry
        return StepResult(
            observation=verdict_text(self._style, is_right=is_right, is_retry=options.retry),
            reward=GRADES[options.metric](text, golden),
            done=self._done,
            is_valid=True,
        )

    def save(self) -> dict[str, Any]:
        """Return the queries, and the passages that they found."""
        passages = [asdict(passage) for passage in self._found]
        return {"asked": [*self._asked], "found": passages}

    def load(self, state: dict[str, Any]) -> None:
        """Continue with saved queries and passages."""
        self._asked = dict.fromkeys(state["asked"])
        self._found = [Passage(**passage) for passage in state["found"]]

    def _valid_actions(self) -> list[str]:
        actions = [_tagged(ActionTag.SEARCH, self._question.text), self.expert_action()]
        return list(dict.fromkeys(one for one in actions if one is not None))

    def _expert_action(self) -> str | None:
        """Return the search for the next missing fact, or the answer once all facts were found.

        Without known hops, the action is a search for the question itself, or a golden answer if
        the found passages contain one.
        """
        for hop in self._question.hops:
            if not self._has_found(hop):
                return None if hop.query in self._asked else _tagged(ActionTag.SEARCH, hop.query)
        answer = self._question.golden_answers[0]
        if self._question.hops:
            return _tagged(ActionTag.ANSWER, answer)
        in_sight = [one for one in self._question.golden_answers if self._is_in_results(one)]
        if in_sight:
            return _tagged(ActionTag.ANSWER, in_sight[0])
        if self._question.text in self._asked:
            return None
        return _tagged(ActionTag.SEARCH, self._question.text)

    def _has_found(self, hop: Hop) -> bool:
        """Return whether a search has returned the passage of a fact."""
        return any(one.title == hop.title and hop.evidence in one.text for one in self._found)

    def _is_in_results(self, answer: str) -> bool:
        """Return whether a found passage contains an answer."""
        return any(answer in one.title or answer in one.text for one in self._found)

    def render(self) -> str:
        """Return the question, its answers and the titles found so far."""
        answers = " | ".join(self._question.golden_answers)
        titles = ", ".join(passage.title for passage in self._found) or "nothing"
        return f"question: {self._question.text}\nanswers: {answers}\nfound: {titles}"

    def _state(self) -> str:
        return "\n".join([self._question.text, *self._question.golden_answers])


def _tagged(kind: ActionTag, text: str) -> str:
    return f"<{kind}>{text}</{kind}>"


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return deep search's catalogue entry.

    Raises: ConfigError: there are no questions.
    """
    is_retry = options.searchqa.retry or options.agentgym_rules
    shared = Library(replace(options.searchqa, retry=is_retry))
    subsets = shared.bank().subsets()
    if not subsets:
        raise ConfigError(
            " ".join(library.faults(options.searchqa)) or "searchqa: there are no questions"
        )
    return EnvSpec(
        name="searchqa",
        subsets=subsets,
        **opening_texts(),
        make=lambda style: SearchqaEnv(style, shared, subsets),
        tasks=_tasks(subsets),
        isolation=Isolation.WORKER,
        sessions_per_worker=SESSIONS_PER_WORKER,
        worker_memory_bytes=library.memory_bytes(options.searchqa),
        step_timeout_s=library.call_timeout_s(options.searchqa),
        from_agentgym=lambda index: agentgym_item(index, subsets, wrap=shared.is_world),
        content=library.content_of(options.searchqa),
    )


def _tasks(subsets: Mapping[str, SubsetSpec]) -> dict[str, TaskSpec]:
    """Return the catalogue's tasks, without items that are missing in the question files."""

    def existing_items(items: Sequence[str], num_items: int) -> tuple[str, ...]:
        """Return the items that the question files have."""
        split = [(item, split_item(item)) for item in items]
        return tuple(item for item, parts in split if parts and parts.index < num_items)

    tasks = load_tasks(__file__)
    return {
        name: replace(
            task,
            train=existing_items(task.train, subsets[task.subset].num_train),
            test=existing_items(task.test, subsets[task.subset].num_test),
        )
        for name, task in tasks.items()
        if task.subset in subsets
    }


def check(options: EnvsSection) -> list[str]:
    """Return a line with its remedy for each invalid file or URL of the options."""
    return library.faults(options.searchqa)
