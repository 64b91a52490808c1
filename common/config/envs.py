"""The section `envs`: options of the environments, the sandbox, and data sets."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from common.config.knobs import ANY_TEXT, PATH, SANDBOX, URL, WORD, Contradiction, knob, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFiles:
    """Published item lists, in the format of AgentGym-RL's AgentItemId and of AgentEval."""

    train_items: str = knob("", "Names a file with the training items of the subset `agentgym`.")
    test_items: str = knob("", "Names a file with the test items of the subset `agentgym`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextcraftOptions(ItemFiles):
    """Crafting from recipes."""

    recipes_dir: str = knob(
        "", "Names a folder of recipe files in Minecraft's format. Empty uses the built-in recipes."
    )
    exchanged_frac: float = knob(
        0.0, "Randomises the words and numbers of this share of the training items.", ge=0, le=1
    )
    max_distractors: int = knob(
        -1,
        "Shows at most this many recipes that the goal does not need. -1 means 5, or 10 with "
        "recipes_dir.",
        ge=-1,
        le=1_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BabyaiOptions(ItemFiles):
    """Grid worlds of minigrid."""

    shaped_reward: bool = knob(
        False, "Rewards success with 1 - 0.9 * steps / max_steps instead of 1."
    )
    agentgym_goals: bool = knob(
        False, 'Words goals as AgentGym does: "and" replaces "then" and "after you".'
    )
    agentgym_layouts: bool = knob(
        False, "Uses AgentGym's layouts, including the few that cannot be solved."
    )
    agentgym_rules: bool = knob(
        False, "Uses all of AgentGym's rules: goals, layouts, shaped reward, actions and numbers."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SciworldOptions(ItemFiles):
    """ScienceWorld. Each live episode has its own small JVM."""

    max_jvms: int = knob(
        8, "Limits the live episodes. Each of them has a Java process.", ge=1, le=10**4
    )
    jvm_memory_mib: int = knob(
        160, "Limits the heap of an episode's Java process, in MiB.", ge=16, le=10**6
    )
    gold_memory_mib: int = knob(
        512, "Limits the heap of the Java process that computes solutions, in MiB.", ge=16, le=10**6
    )
    call_timeout_s: float = seconds(
        60.0, "Limits the seconds in which the simulator must answer a call.", gt=0
    )
    simplifications: str = knob(
        "", "Lists ScienceWorld's own simplifications, separated by commas, such as `easy`."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchqaOptions(ItemFiles):
    """Deep search: question answering with a retriever."""

    questions_dir: str = knob(
        "", "Names a folder of <dataset>_<train|test>.jsonl. Empty uses a generated world of facts."
    )
    corpus: str = knob(
        "", "Names a file of passages in JSON lines. Empty uses those of the generated world."
    )
    index_dir: str = knob(
        "", "Names the folder that keeps the index of the corpus. Empty means beside the corpus."
    )
    retriever_url: str = knob(
        "", "Names the URL of a server that replaces the built-in index.", form=URL, also=""
    )
    retriever_timeout_s: float = seconds(
        10.0, "Limits the seconds in which the retrieval server must answer.", gt=0
    )
    num_passages: int = knob(3, "Returns this many passages from a search.", ge=1, le=1000)
    metric: str = knob(
        "em", "Selects how an answer is scored: exact match or word F1.", one_of=("em", "f1")
    )
    retry: bool = knob(False, "Lets the agent answer again after a wrong answer, as AgentGym does.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserOptions:
    """The browser of the web environments."""

    executable: str = knob(
        "", "Names the path of the browser. Empty searches the PATH for Chromium or Chrome."
    )
    max_sessions: int = knob(16, "Limits the live episodes. All share one browser.", ge=1)
    action_timeout_s: float = seconds(
        5.0, "Limits the seconds in which the browser must perform an action.", gt=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WebarenaOptions(ItemFiles):
    """URLs of WebArena's sites. Tasks of a site without a URL are left out."""

    shopping: str = knob(
        "", "Names the URL of the shop. Empty leaves its tasks out.", form=URL, also=""
    )
    shopping_admin: str = knob(
        "",
        "Names the URL of the shop's administration. Empty leaves its tasks out.",
        form=URL,
        also="",
    )
    reddit: str = knob(
        "", "Names the URL of the forum. Empty leaves its tasks out.", form=URL, also=""
    )
    gitlab: str = knob(
        "", "Names the URL of GitLab. Empty leaves its tasks out.", form=URL, also=""
    )
    map: str = knob(
        "", "Names the URL of OpenStreetMap. Empty leaves its tasks out.", form=URL, also=""
    )
    wikipedia: str = knob(
        "", "Names the URL of Wikipedia. Empty leaves its tasks out.", form=URL, also=""
    )
    homepage: str = knob(
        "",
        "Names the URL of the page that lists the sites. Empty: tasks have no such page.",
        form=URL,
        also="",
    )
    auth_dir: str = knob(
        "",
        "Names a folder with Playwright's storage states of logged-in accounts, <site>_state.json "
        "each.",
    )
    observation_tokens: int = knob(
        4000, "Limits an observation (the accessibility tree) to this many words.", ge=1
    )

    @property
    def sites(self) -> dict[str, str]:
        """The URLs of the configured sites by WebArena's names, without a trailing slash."""
        urls = {
            "shopping": self.shopping,
            "shopping_admin": self.shopping_admin,
            "reddit": self.reddit,
            "gitlab": self.gitlab,
            "map": self.map,
            "wikipedia": self.wikipedia,
            "homepage": self.homepage,
        }
        return {name: url.rstrip("/") for name, url in urls.items() if url}

    @property
    def is_configured(self) -> bool:
        """Whether any site has a URL."""
        return bool(self.sites)


@dataclass(frozen=True, slots=True, kw_only=True)
class MinisitesOptions:
    """Small web sites of this project; not WebArena."""

    observation_tokens: int = knob(
        4000, "Limits an observation (the accessibility tree) to this many words.", ge=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlgymOptions(ItemFiles):
    """Text to SQL on sqlite databases."""

    bird_dir: str = knob(
        "", "Names the folder of the BIRD dataset. Empty uses generated databases."
    )
    query_timeout_s: float = seconds(
        2.0, "Limits the seconds of processor time of a statement.", gt=0
    )
    gold_timeout_s: float = seconds(
        30.0, "Limits the seconds of processor time of a reference statement.", gt=0
    )
    max_rows: int = knob(
        1000, "Limits the rows of a result, unless the reference result has more.", ge=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WordleOptions(ItemFiles):
    """Wordle with a short word list."""

    words: str = knob(
        "", "Names a file of words, such as tweet_words.txt of LMRL-Gym. Empty uses our list."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextworldOptions:
    """Games that TextWorld generates. See docs/tasks/TEXTWORLD.md."""

    level: int = knob(
        5,
        "Sets the level of coin_collector (1 to 100 rooms without, 101 to 150 with dead ends) and "
        "of treasure_hunter (1 to 30).",
        ge=1,
        le=300,
    )
    rooms: int = knob(3, "Sets the rooms of a custom game.", ge=1, le=50)
    objects: int = knob(5, "Sets the objects of a custom game.", ge=1, le=200)
    quest_length: int = knob(
        3, "Sets the commands that solve a custom game in the best case.", ge=1, le=50
    )
    min_quest_length: int = knob(
        0,
        "Gives the custom games lengths from this number to quest_length, in turn. 0: all have "
        "quest_length.",
        ge=0,
        le=50,
    )
    num_train: int = knob(300, "Sets the number of training games.", ge=1, le=10**6)
    num_validation: int = knob(50, "Sets the number of validation games.", ge=0, le=10**6)
    num_test: int = knob(50, "Sets the number of test games.", ge=0, le=10**6)
    max_turns: int = knob(30, "Limits the commands of an episode.", ge=1, le=10**4)
    lists_commands: bool = knob(
        False, "Appends TextWorld's list of the admissible commands to each observation."
    )
    max_workers: int = knob(1, "Limits the worker processes.", ge=1, le=1000)

    def contradictions(self) -> Iterator[Contradiction]:
        if self.min_quest_length > self.quest_length:
            law = f"must be at most quest_length={self.quest_length}"
            yield "min_quest_length", self.min_quest_length, law


@dataclass(frozen=True, slots=True, kw_only=True)
class BfclOptions:
    """Multi-turn tasks with tools of the Berkeley Function-Calling Leaderboard.

    See docs/tasks/BFCL.md.
    """

    reward: str = knob(
        "passed",
        "Rewards an episode that the checker accepts, or the share of its user turns that it "
        "accepts.",
        one_of=("passed", "share"),
    )
    max_calls: int = knob(
        20, "Limits the calls of tools after one message of the user.", ge=1, le=10**4
    )
    result_chars: int = knob(
        4000, "Limits the result of a call that the agent reads, in characters.", ge=100, le=10**7
    )
    max_workers: int = knob(1, "Limits the worker processes.", ge=1, le=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """A file of prompts with reward functions. `data.KEY` is short for `envs.dataset.KEY`.

    `reward` is short for `envs.dataset.reward`. See docs/DATASETS.md.
    """

    train: str = knob(
        "",
        "Names the training records: a JSONL, JSON, CSV or Parquet file, a folder of Hugging Face "
        "datasets, a name of the Hub as owner/name[@revision][:configuration][:split], or "
        "generated tasks as reasoning_gym:NAME,NAME.",
        form=PATH,
        also="",
    )
    eval: str = knob(
        "",
        "Names the held-out records. Empty takes data.eval_split of the folder data.train, or else "
        "data.eval_size records of data.train.",
        form=PATH,
        also="",
    )
    validation: str = knob(
        "",
        "Names the records of eval.split=validation. Empty takes data.validation_split of the "
        "folder data.train, or else data.validation_size records of data.train.",
        form=PATH,
        also="",
    )
    train_split: str = knob("train", "Selects the split of a folder for training.", form=WORD)
    validation_split: str = knob(
        "validation", "Selects the split of a folder for eval.split=validation.", form=WORD
    )
    eval_split: str = knob("test", "Selects the split of a folder for evaluation.", form=WORD)
    eval_size: int = knob(
        -1,
        "Holds out this many records of data.train if there are no others. -1 means a tenth, at "
        "most 200, or 200 generated ones.",
        ge=-1,
        le=10**6,
    )
    validation_size: int = knob(
        -1,
        "Holds out this many records of data.train for eval.split=validation if there are no "
        "others. -1 means none, or 200 generated ones.",
        ge=-1,
        le=10**6,
    )
    train_size: int = knob(
        -1,
        "Trains on this many records, the first ones. -1 means all, or 10,000 generated ones.",
        ge=-1,
        le=10**6,
    )
    options: dict[str, Any] = knob(
        {},
        "Sets options of generated tasks, by the task's name, such as "
        "data.options.chain_sum.max_terms=3.",
        form=ANY_TEXT,
    )
    prompt: str = knob(
        "",
        "Names the column with the prompt: a text, or a list of messages. Empty tries prompt, "
        "messages, question, problem, instruction and input.",
    )
    answer: str = knob(
        "",
        "Names the column with the reference answer; a dot enters an object. Empty tries answer, "
        "ground_truth, solution, reward_model.ground_truth, response, output, completion and "
        "target.",
    )
    template: str = knob(
        "{{ prompt }}",
        "Sets the Jinja template of the prompt, or names a .jinja file. The columns are its "
        "variables.",
        form=ANY_TEXT,
    )
    system: str = knob(
        "", "Sets the system prompt, or names a .txt, .md or .jinja file.", form=ANY_TEXT
    )
    tools: str = knob(
        "",
        "Names the column, or the JSON file, with the tools that the agent may call. Records may "
        "have tools of their own. data.step answers the calls; without it, a call is the answer.",
    )
    step: str = knob(
        "",
        "Names a function that answers the agent, as module:function or file.py:function. Empty "
        "ends an episode after one turn.",
    )
    max_turns: int = knob(
        8, "Limits the turns of an episode. Without data.step it has one turn.", ge=1, le=10**5
    )
    max_length: int = knob(
        0,
        "Leaves out records with a longer prompt, in tokens of data.tokenizer or else in "
        "characters. 0 keeps all.",
        ge=0,
        le=10**9,
    )
    tokenizer: str = knob(
        "",
        "Names a model's folder or its tokenizer.json, which measures data.max_length in tokens.",
        form=PATH,
        also="",
    )
    shuffle: int = knob(
        -1, "Shuffles the training records by this seed. -1 keeps their order.", ge=-1, lt=2**32
    )
    reward: Any = knob(
        None,
        "Names the reward function: module:function, file.py:function, or exact_number, "
        "exact_text, math, verifier or none. auto is the verifier of generated tasks, and "
        "exact_number of other records. Without a reward, generated tasks have their verifier. A "
        "map from names to functions, or to sections with function, weight, min, max, timeout_s "
        "and retries, adds several. A section with url or path is a judge, see docs/JUDGES.md.",
        form=ANY_TEXT,
    )
    reward_timeout_s: float = seconds(
        30.0, "Limits the seconds of a call of a reward or of data.step.", gt=0
    )
    reward_retries: int = knob(
        0, "Calls a reward that failed or timed out this many times again.", ge=0, le=100
    )
    success_from: float = knob(
        1.0, "Counts an episode as solved from this total reward on, in [0, 1].", ge=0, le=1
    )
    max_sessions: int = knob(64, "Limits the live episodes of one worker process.", ge=1, le=10_000)
    max_workers: int = knob(
        1, "Limits the worker processes, which call the rewards.", ge=1, le=1000
    )
    worker_memory_gib: float = knob(
        8.0,
        "Limits the memory of a worker process, in GiB. A larger one is replaced.",
        gt=0,
        le=1e4,
    )


MOST_MIB = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """Containers of tasks, whose images Docker or Podman builds or pulls. See docs/SANDBOX.md."""

    memory_mib: int = knob(
        2048,
        "Limits the memory of a container, in MiB. A task's own limit replaces it.",
        ge=16,
        le=MOST_MIB,
    )
    cpus: float = knob(
        0.0,
        "Limits the processors of a container. 0 means all. A task's own limit replaces it.",
        ge=0,
        le=10_000,
    )
    disk_mib: int = knob(
        4096,
        "Limits the files that a container writes, in MiB. A task's own limit replaces it.",
        ge=4,
        le=MOST_MIB,
    )
    max_files: int = knob(
        500_000, "Limits the files and folders that a container writes.", ge=100, le=10**8
    )
    processes: int = knob(512, "Limits the processes and threads of a container.", ge=16, le=10**6)
    build_timeout_s: float = seconds(
        1800.0, "Limits the seconds of the build of an image. A task may set a lower limit.", gt=0
    )
    build_network: bool = knob(
        True, "Lets the build of an image reach the network, for example to install programs."
    )
    pull_timeout_s: float = seconds(1800.0, "Limits the seconds of the pull of an image.", gt=0)
    max_builds: int = knob(2, "Limits the builds at the same time.", ge=1, le=1000)
    max_images: int = knob(
        200, "Keeps this many built images. The oldest ones are removed.", ge=1, le=10**6
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """The sandbox in which the environments `code` and `terminal` run programs."""

    backend: str = knob(
        "bwrap",
        "Selects the sandbox: bwrap (bubblewrap), containers of docker or podman, remote for a "
        "server, or harbor:PROVIDER, such as harbor:modal, harbor:e2b or harbor:daytona.",
        form=SANDBOX,
    )
    memory_mib: int = knob(
        512, "Limits the memory of all processes of a sandbox, in MiB.", ge=16, le=MOST_MIB
    )
    processes: int = knob(64, "Limits the processes and threads of a sandbox.", ge=4, le=10**5)
    open_files: int = knob(256, "Limits the open files of a process.", ge=16, le=10**6)
    max_files: int = knob(
        20_000, "Limits the files and folders that a sandbox may hold.", ge=100, le=10**8
    )
    file_mib: int = knob(64, "Limits the size of a file, in MiB.", ge=1, le=MOST_MIB)
    disk_mib: int = knob(
        64,
        "Limits the size of the work folder and of /tmp, in MiB. Both are in memory.",
        ge=4,
        le=MOST_MIB,
    )
    cgroups: bool = knob(
        True, "Limits memory and processes with control groups, too, where the hub may create them."
    )
    start_timeout_s: float = seconds(60.0, "Limits the seconds in which a sandbox starts.", gt=0)
    uid: int = knob(
        65534,
        "Sets the user that runs bubblewrap's sandboxes if the hub runs as root.",
        ge=1,
        lt=2**31,
    )
    python: str = knob(
        "", "Names the Python inside of the sandbox. Empty searches the system's folders."
    )
    mounts: list[str] = knob(
        [],
        "Shows more folders of the machine in the sandbox, read-only, as PATH or PATH:TARGET.",
        form=PATH,
    )
    image: str = knob(
        "python:3.12-slim",
        "Names the image of containers whose task has neither an image nor a Dockerfile.",
    )
    containers: ContainerOptions = field(default_factory=ContainerOptions)
    harbor_python: str = knob(
        "",
        "Names the Python with the package harbor. Empty means the one of the command harbor.",
        form=PATH,
        also="",
    )
    url: str = knob("", "Names the URL of the sandbox server.", form=URL, also="")
    token_env: str = knob(
        "SANDBOX_TOKEN",
        "Names the environment variable with the token of the sandbox server.",
        form=WORD,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.backend == "remote" and not self.url:
            yield "url", self.url, "envs.sandbox.backend=remote needs the URL of a server"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """Programming problems with tests. See docs/SANDBOX.md."""

    train: str = knob(
        "configs/data/code/train.jsonl",
        "Names a file of problems in the format of MBPP or HumanEval, for training.",
        form=PATH,
    )
    eval: str = knob(
        "configs/data/code/test.jsonl", "Names a file of held-out problems.", form=PATH, also=""
    )
    reward: str = knob(
        "passed",
        "Rewards an answer that passes all tests, or the share of tests that pass.",
        one_of=("passed", "share"),
    )
    timeout_s: float = seconds(5.0, "Limits the seconds of one test.", gt=0)
    total_timeout_s: float = seconds(60.0, "Limits the seconds of all tests of an answer.", gt=0)
    max_sessions: int = knob(
        16, "Limits the live episodes. Tests run in one sandbox each.", ge=1, le=10_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalOptions:
    """Tasks in a terminal, in the format of Harbor or Terminal-Bench. See docs/SANDBOX.md."""

    train: str = knob(
        "configs/data/terminal",
        "Names the training tasks: a folder with one folder each, a file of instances of "
        "SWE-bench, SWE-smith or R2E-Gym, or harbor:NAME@VERSION.",
    )
    eval: str = knob(
        "",
        "Names the held-out tasks in the same way. Without them there is no evaluation.",
        form=PATH,
        also="",
    )
    cache: str = knob(
        "",
        "Names the folder with the task sets of names, as NAME@VERSION. Empty means "
        "longstride/tasks in the user's cache folder.",
        form=PATH,
        also="",
    )
    registry: str = knob(
        "",
        "Names the file or URL of a registry of Harbor. Empty means Harbor's own.",
        form=PATH,
        also="",
    )
    max_turns: int = knob(20, "Limits the commands of an episode.", ge=1, le=10_000)
    command_timeout_s: float = seconds(30.0, "Limits the seconds of a command.", gt=0)
    test_timeout_s: float = seconds(
        600.0, "Limits the seconds of the tests. A task may set a lower limit.", gt=0
    )
    output_chars: int = knob(
        4000,
        "Limits the output of a command that the agent reads, in characters.",
        ge=100,
        le=10**7,
    )
    keeps_processes: bool = knob(
        False,
        "Keeps the agent's background processes during the tests. They could change the tests.",
    )
    network: str = knob(
        "none",
        "Selects the network of containers: none, or the one of the task's settings. A task that "
        "asks for a network is refused with none.",
        one_of=("none", "task"),
    )
    without_network: bool = knob(
        False, "Plays a task that asks for a network (network_mode, allow_internet) without one."
    )
    max_sessions: int = knob(
        16, "Limits the live episodes. Each of them has a sandbox.", ge=1, le=10_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvsSection:
    """Options of all environments. Options of environments that are not served have no effect."""

    agentgym_rules: bool = knob(
        False,
        "Plays BabyAI, ScienceWorld and SearchQA by the rules of AgentGym's servers, for "
        "comparisons.",
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
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    textworld: TextworldOptions = field(default_factory=TextworldOptions)
    bfcl: BfclOptions = field(default_factory=BfclOptions)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    code: CodeOptions = field(default_factory=CodeOptions)
    terminal: TerminalOptions = field(default_factory=TerminalOptions)
    plugins: dict[str, str] = knob(
        {}, "Sets options of environments outside the package, by the environment's name."
    )
    run_dir: str = knob(
        "",
        "Names the folder in which environments keep files. A run uses its own directory.",
        form=PATH,
        also="",
    )
    gives_facts: bool = knob(
        False, "Adds the item's record to each finished episode, for groups.reward, which sets it."
    )


def choose_env(name: str, envs: EnvsSection) -> str:
    """Return the environment for a task's `env`: for a|b the first configured one, or b."""
    *firsts, last = name.split("|")
    is_set = {"webarena": envs.webarena.is_configured}
    return next((env for env in firsts if is_set.get(env, True)), last)


def own_tasks(name: str, envs: EnvsSection) -> str:
    """Return a note for tables about an environment with this project's tasks; "" for others."""
    notes = {
        "textcraft": "" if envs.textcraft.recipes_dir else "own recipes instead of Minecraft's",
        "searchqa": "" if envs.searchqa.questions_dir else "questions about a generated world",
        "sqlgym": "" if envs.sqlgym.bird_dir else "generated databases instead of BIRD",
        "wordle": "" if envs.wordle.words else "own list of words",
        "minisites": "minisites, not WebArena",
    }
    return notes.get(name, "")
