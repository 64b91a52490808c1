"""Options of the environments: `envs.<name>.<option>`; the names are those of the registry."""

from dataclasses import dataclass, field

from common.errors import ConfigError


def _require(condition: bool, key: str, value: object, law: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r}: {law}")


@dataclass(slots=True, kw_only=True)
class TextcraftOptions:
    """Crafting from recipes."""

    recipes_dir: str = ""  # folder of Minecraft-format recipe files; "": our own book


@dataclass(slots=True, kw_only=True)
class BabyaiOptions:
    """Grid worlds of minigrid."""

    shaped_reward: bool = False  # success pays 1 - 0.9 * steps / max_steps instead of 1
    agentgym_goals: bool = False  # AgentGym's wording: "and" for "then" and "after you"
    agentgym_layouts: bool = False  # AgentGym's layouts, also the few that nobody can solve
    agentgym_rules: bool = False  # all three, and its actions, numbers, paths and lost rewards


@dataclass(slots=True, kw_only=True)
class SciworldOptions:
    """ScienceWorld, one small JVM per live episode."""

    max_jvms: int = 8
    jvm_memory_mib: int = 160
    gold_memory_mib: int = 512  # of the JVM that works out solutions, only while it is asked
    call_timeout_s: float = 60.0  # longest wait for the simulator's answer
    simplifications: str = ""  # ScienceWorld's own words, comma-separated, such as "easy"


@dataclass(slots=True, kw_only=True)
class SearchqaOptions:
    """Deep search: questions answered with a retriever."""

    questions_dir: str = ""  # <dataset>_<train|test>.jsonl; "": a generated world of facts
    corpus: str = ""  # JSON lines of passages; "": the generated world's
    index_dir: str = ""  # where the index of `corpus` is kept; "": beside the corpus
    retriever_url: str = ""  # an external retrieval server instead of the built-in index
    retriever_timeout_s: float = 10.0
    num_passages: int = 3
    metric: str = "em"  # em | f1
    retry: bool = False  # True: a wrong answer may be tried again, as in AgentGym

    def __post_init__(self) -> None:
        ok = self.metric in ("em", "f1")
        _require(ok, "envs.searchqa.metric", self.metric, "one of em, f1")
        _require(self.num_passages > 0, "envs.searchqa.num_passages", self.num_passages, "> 0")


@dataclass(slots=True, kw_only=True)
class BrowserOptions:
    """The browser that web environments drive."""

    executable: str = ""  # "": chromium, chromium-browser, google-chrome from the PATH
    max_sessions: int = 16  # contexts of the one browser
    action_timeout_s: float = 5.0


@dataclass(slots=True, kw_only=True)
class WebarenaOptions:
    """WebArena's sites, by URL; tasks of a site without one are left out."""

    shopping: str = ""
    shopping_admin: str = ""
    reddit: str = ""
    gitlab: str = ""
    map: str = ""
    wikipedia: str = ""
    homepage: str = ""
    auth_dir: str = ""  # Playwright storage states of the logged-in accounts, <site>_state.json
    observation_tokens: int = 4000  # longest accessibility tree, in words

    @property
    def is_configured(self) -> bool:
        """Whether any site has an address."""
        sites = (self.shopping, self.shopping_admin, self.reddit, self.gitlab, self.map)
        return any((*sites, self.wikipedia, self.homepage))


@dataclass(slots=True, kw_only=True)
class MinisitesOptions:
    """Small web sites of our own; not WebArena."""

    observation_tokens: int = 4000  # longest accessibility tree, in words


@dataclass(slots=True, kw_only=True)
class SqlgymOptions:
    """Text to SQL on sqlite databases."""

    bird_dir: str = ""  # BIRD's folder; "": generated databases
    query_timeout_s: float = 2.0  # processor time
    gold_timeout_s: float = 30.0  # the same for a gold statement
    max_rows: int = 1000


@dataclass(slots=True, kw_only=True)
class RemoteOptions:
    """An AgentGym server driven as an environment of ours; its name is the dialect."""

    url: str = ""  # such as http://10.0.0.5:36001, without a trailing slash
    dialect: str = ""  # textcraft, babyai, sciworld, alfworld, maze, wordle, webshop, ...
    num_train: int = 1000  # its items 0.. are training items
    num_test: int = 100  # its items after those are test items
    max_turns: int = 30
    timeout_s: float = 60.0
    max_sessions: int = 64

    def __post_init__(self) -> None:
        ok = bool(self.url) == bool(self.dialect)
        _require(ok, "env.url", self.url, "goes together with env.dialect=<name>")


@dataclass(slots=True, kw_only=True)
class EnvsSection:
    """Options of every environment; one that is not served is ignored.

    `agentgym_rules` is the mode for comparing with AgentGym's servers: BabyAI by their rules, and
    questions that may be answered again.
    """

    agentgym_rules: bool = False
    textcraft: TextcraftOptions = field(default_factory=TextcraftOptions)
    babyai: BabyaiOptions = field(default_factory=BabyaiOptions)
    sciworld: SciworldOptions = field(default_factory=SciworldOptions)
    searchqa: SearchqaOptions = field(default_factory=SearchqaOptions)
    browser: BrowserOptions = field(default_factory=BrowserOptions)
    minisites: MinisitesOptions = field(default_factory=MinisitesOptions)
    webarena: WebarenaOptions = field(default_factory=WebarenaOptions)
    sqlgym: SqlgymOptions = field(default_factory=SqlgymOptions)
    plugins: dict[str, str] = field(default_factory=dict[str, str])  # options of outside ones

    def __post_init__(self) -> None:
        if self.agentgym_rules:
            self.babyai.agentgym_rules = self.searchqa.retry = True


def choose_env(name: str, envs: EnvsSection) -> str:
    """Return the environment that a task's `env` means.

    Args:
        name: a name, or names joined by "|": then the first that is configured, else the last.
    """
    *firsts, last = name.split("|")
    is_set = {"webarena": envs.webarena.is_configured}
    return next((each for each in firsts if is_set.get(each, True)), last)
