"""Options of the environments: `envs.<name>.<option>`, with names from the registry."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from common.config.knobs import URL, WORD, Contradiction, knob, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFiles:
    """Published item lists, in the format of AgentGym-RL's AgentItemId and of AgentEval."""

    train_items: str = knob("", "file with the training items of subset `agentgym`")
    test_items: str = knob("", "file with its test items")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextcraftOptions(ItemFiles):
    """Crafting from recipes."""

    recipes_dir: str = knob("", 'folder of Minecraft-format recipe files; "": our own book')
    exchanged_frac: float = knob(
        0.0,
        "of the training items with words exchanged and numbers drawn anew, so that they are read",
        ge=0,
        le=1,
    )
    max_distractors: int = knob(
        -1, "recipes shown beside those needed, at most; -1: 5, of a folder 10", ge=-1, le=1_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BabyaiOptions(ItemFiles):
    """Grid worlds of minigrid."""

    shaped_reward: bool = knob(False, "success pays 1 - 0.9 * steps / max_steps instead of 1")
    agentgym_goals: bool = knob(False, 'AgentGym\'s wording: "and" for "then" and "after you"')
    agentgym_layouts: bool = knob(False, "AgentGym's layouts, also the few that nobody can solve")
    agentgym_rules: bool = knob(False, "all three, its actions, numbers, paths and lost rewards")


@dataclass(frozen=True, slots=True, kw_only=True)
class SciworldOptions(ItemFiles):
    """ScienceWorld. Each live episode has its own small JVM."""

    max_jvms: int = knob(8, "live episodes", ge=1, le=10**4)
    jvm_memory_mib: int = knob(160, "MiB of heap", ge=16, le=10**6)
    gold_memory_mib: int = knob(
        512, "MiB of the JVM that works out solutions when asked", ge=16, le=10**6
    )
    call_timeout_s: float = seconds(
        60.0, "longest wait for the simulator's answer, in seconds", gt=0
    )
    simplifications: str = knob("", 'ScienceWorld\'s own words, comma-separated, such as "easy"')


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchqaOptions(ItemFiles):
    """Deep search: question answering with a retriever."""

    questions_dir: str = knob("", '<dataset>_<train|test>.jsonl; "": a generated world of facts')
    corpus: str = knob("", 'JSON lines of passages; "": the generated world\'s')
    index_dir: str = knob("", 'where the index of the corpus is kept; "": beside it')
    retriever_url: str = knob("", "retrieval server in place of the own index", form=URL, also="")
    retriever_timeout_s: float = seconds(10.0, "seconds for one of its answers", gt=0)
    num_passages: int = knob(3, "of one answer", ge=1, le=1000)
    metric: str = knob("em", "of an answer: exact match or word F1", one_of=("em", "f1"))
    retry: bool = knob(False, "a wrong answer may be tried again, as in AgentGym")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserOptions:
    """The browser of the web environments."""

    executable: str = knob("", '"": chromium, chromium-browser, google-chrome from the PATH')
    max_sessions: int = knob(16, "contexts of the one browser", ge=1)
    action_timeout_s: float = seconds(5.0, "seconds for one action", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebarenaOptions(ItemFiles):
    """URLs of WebArena's sites. Tasks of a site without a URL are left out."""

    shopping: str = knob("", "URL of the shop", form=URL, also="")
    shopping_admin: str = knob("", "URL of the shop's administration", form=URL, also="")
    reddit: str = knob("", "URL of the forum", form=URL, also="")
    gitlab: str = knob("", "URL of GitLab", form=URL, also="")
    map: str = knob("", "URL of OpenStreetMap", form=URL, also="")
    wikipedia: str = knob("", "URL of Wikipedia", form=URL, also="")
    homepage: str = knob("", "URL of the page that lists the sites", form=URL, also="")
    auth_dir: str = knob("", "Playwright storage states of logged-in accounts, <site>_state.json")
    observation_tokens: int = knob(4000, "longest accessibility tree, in words", ge=1)

    @property
    def sites(self) -> dict[str, str]:
        """The URLs of the configured sites by WebArena's names, without a trailing slash."""
        found = {
            "shopping": self.shopping,
            "shopping_admin": self.shopping_admin,
            "reddit": self.reddit,
            "gitlab": self.gitlab,
            "map": self.map,
            "wikipedia": self.wikipedia,
            "homepage": self.homepage,
        }
        return {name: url.rstrip("/") for name, url in found.items() if url}

    @property
    def is_configured(self) -> bool:
        """Whether any site has a URL."""
        return bool(self.sites)


@dataclass(frozen=True, slots=True, kw_only=True)
class MinisitesOptions:
    """Small web sites of this project; not WebArena."""

    observation_tokens: int = knob(4000, "longest accessibility tree, in words", ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlgymOptions(ItemFiles):
    """Text to SQL on sqlite databases."""

    bird_dir: str = knob("", 'BIRD\'s folder; "": generated databases')
    query_timeout_s: float = seconds(2.0, "seconds of processor time", gt=0)
    gold_timeout_s: float = seconds(30.0, "the same for a gold statement", gt=0)
    max_rows: int = knob(1000, "of a result", ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordleOptions(ItemFiles):
    """Wordle with a short word list."""

    words: str = knob("", 'file of them, such as LMRL-Gym\'s tweet_words.txt; "": our own')


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """A server of AgentGym or OpenEnv as an environment of the run, named by its dialect."""

    url: str = knob("", "such as http://10.0.0.5:36001", form=URL, also="")
    dialect: str = knob(
        "", "openenv, or textcraft, babyai, alfworld, webshop, ...", form=WORD, also=""
    )
    train_items: str = knob("", "file of AgentGym-RL's with the training items; OpenEnv: a split")
    test_items: str = knob("", "file of AgentEval's with the test items; OpenEnv: a split")
    num_train: int = knob(-1, "of the training items, evenly spread; -1: all", ge=-1, le=10**7)
    num_test: int = knob(-1, "of the test items, evenly spread; -1: all", ge=-1, le=10**7)
    max_turns: int = knob(30, "of an episode", ge=1, le=10**5)
    timeout_s: float = seconds(60.0, "seconds for one of its answers", gt=0)
    max_sessions: int = knob(64, "live episodes", ge=1)
    action_field: str = knob("", "of an OpenEnv action that the agent's text becomes; its own JSON")
    observation_field: str = knob("", "of an OpenEnv observation that the agent is told; all")
    reward: str = knob("last", "of an OpenEnv episode: its rewards'", one_of=("last", "sum"))
    min_reward: float = knob(0.0, "of an OpenEnv episode; it becomes 0", ge=-1e6, le=1e6)
    max_reward: float = knob(1.0, "of an OpenEnv episode; it becomes 1", ge=-1e6, le=1e6)

    def contradictions(self) -> Iterator[Contradiction]:
        if bool(self.url) != bool(self.dialect):
            yield "url", self.url, "goes together with env.dialect=<name>"
        if self.min_reward >= self.max_reward:
            yield "max_reward", self.max_reward, "must be > env.min_reward"
        own = ("action_field", "observation_field", "reward", "min_reward", "max_reward")
        for each in fields(self) if self.dialect != "openenv" else ():
            if each.name in own and (value := getattr(self, each.name)) != each.default:
                yield each.name, value, "goes together with env.dialect=openenv"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvsSection:
    """Options of all environments. Options of environments that are not served have no effect."""

    agentgym_rules: bool = knob(
        False,
        "for comparing with AgentGym's servers: BabyAI by their rules (babyai.agentgym_rules), and"
        " questions that may be answered again (searchqa.retry)",
    )
    textcraft: TextcraftOptions = field(default_factory=TextcraftOptions)
    babyai: BabyaiOptions = field(default_factory=BabyaiOptions)
    sciworld: SciworldOptions = field(default_factory=SciworldOptions)
    searchqa: SearchqaOptions = field(default_factory=SearchqaOptions)
    browser: BrowserOptions = field(default_factory=BrowserOptions)
    minisites: MinisitesOptions = field(default_factory=MinisitesOptions)
    webarena: WebarenaOptions = field(default_factory=WebarenaOptions)
    sqlgym: SqlgymOptions = field(default_factory=SqlgymOptions)
    maze: ItemFiles = field(default_factory=ItemFiles)
    wordle: WordleOptions = field(default_factory=WordleOptions)
    plugins: dict[str, str] = knob({}, "options of outside ones, as they read them")


def choose_env(name: str, envs: EnvsSection) -> str:
    """Return the environment for a task's `env`: for a|b the first configured one, or b."""
    *firsts, last = name.split("|")
    is_set = {"webarena": envs.webarena.is_configured}
    return next((each for each in firsts if is_set.get(each, True)), last)


def own_tasks(name: str, envs: EnvsSection) -> str:
    """Return a note for tables about an environment with this project's tasks; "" for others."""
    own = {
        "textcraft": "" if envs.textcraft.recipes_dir else "recipes of our own, not Minecraft's",
        "searchqa": "" if envs.searchqa.questions_dir else "questions on a world of our own",
        "sqlgym": "" if envs.sqlgym.bird_dir else "generated databases, not BIRD",
        "wordle": "" if envs.wordle.words else "words of our own",
        "minisites": "minisites, not WebArena",
    }
    return own.get(name, "")
