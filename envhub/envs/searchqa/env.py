"""Deep search: questions to answer with a retriever, in the tags of Search-R1 and AgentGym."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.config.envs import EnvsSection
from common.errors import ConfigError
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
from envhub.envs.searchqa import library, prompts, tags
from envhub.envs.searchqa.grade import GRADES, exact_match
from envhub.envs.searchqa.library import Library
from envhub.envs.searchqa.passages import Passage, worded
from envhub.envs.searchqa.questions import Hop, agentgym_item
from envhub.envs.searchqa.tags import ActionTag
from envhub.envs.text_env import TextEnv
from envhub.tasks import load_tasks

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
        return prompts.first_observation(self._question, self._style)

    def _step(self, action: str) -> StepResult:
        """Search or grade an answer; any other text is invalid."""
        wanted = tags.parse(action)
        if wanted is None:
            observation = prompts.WORDS[self._style]["invalid"]
            return StepResult(observation=observation, reward=0.0, done=False, is_valid=False)
        if wanted.kind is ActionTag.SEARCH:
            observation = self._search(wanted.text[:MAX_QUERY_CHARS])
            return StepResult(observation=observation, reward=0.0, done=False, is_valid=True)
        return self._answer(wanted.text)

    def _search(self, query: str) -> str:
        """Return the search results as text, and keep the found passages."""
        found = self._retriever.search(query, self._shared.options.num_passages)
        self._asked[query] = None
        self._found += [passage for passage in found if passage not in self._found]
        return worded(found, self._style)

    def _answer(self, text: str) -> StepResult:
        """Grade an answer."""
        options = self._shared.options
        golden = self._question.golden_answers
        is_right = exact_match(text, golden) == 1.0
        self._done = is_right or not options.retry
        return StepResult(
            observation=prompts.verdict(self._style, is_right=is_right, is_retry=options.retry),
            reward=GRADES[options.metric](text, golden),
            done=self._done,
            is_valid=True,
        )

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
        **prompts.opening(),
        make=lambda style: SearchqaEnv(style, shared, subsets),
        tasks=_tasks(subsets),
        isolation=Isolation.WORKER,
        sessions_per_worker=SESSIONS_PER_WORKER,
        worker_memory_bytes=library.memory_bytes(options.searchqa),
        step_timeout_s=library.call_timeout_s(options.searchqa),
        from_agentgym=lambda index: agentgym_item(index, subsets, wrap=shared.is_world),
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
