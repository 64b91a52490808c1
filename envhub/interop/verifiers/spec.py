"""A taskset of verifiers as an environment: `verifiers:words.yaml`."""

from common.errors import ConfigError
from envhub.env import EnvSpec, Isolation, Style, SubsetSpec
from envhub.interop.verifiers.episode import Shared, VerifiersEpisode
from envhub.interop.verifiers.link import CLOSE_S, PlayerProcess, TasksetOptions, VerifiersFailure
from envhub.interop.yaml_environments import SUBSET, read_description, rule_of, run_coroutine

FORM = 'Answer. Where there is an "Action:", what follows it is the answer.'


def make_spec(reference: str) -> EnvSpec:
    """Return the entry of the taskset that a file describes, named after the file.

    Raises: ConfigError: the file is wrong, or the taskset cannot be loaded.
    """
    path, options = read_description(reference, TasksetOptions)
    if not options.taskset.get("id"):
        raise ConfigError(f"{reference}: taskset.id must name a taskset")
    rule = rule_of(reference, options.min_reward, options.max_reward)

    async def count() -> tuple[int, int]:
        """Return the numbers of the taskset's training and test items."""
        player = await PlayerProcess.start(options, path.parent)
        await player.close()
        return player.num_items

    try:
        num_train, num_test = run_coroutine(count, timeout_s=options.start_timeout_s + 3 * CLOSE_S)
    except VerifiersFailure as error:
        raise ConfigError(f"{reference}: {error}") from error
    subset = SubsetSpec(num_train=num_train, num_test=num_test, max_turns=options.max_turns)
    shared = Shared(options=options, folder=path.parent, subset=subset, rule=rule)

    def make(_: Style) -> VerifiersEpisode:
        return VerifiersEpisode(shared)

    return EnvSpec(
        name=path.stem,
        subsets={SUBSET: subset},
        instruction=dict.fromkeys(Style, FORM),
        make=make,
        isolation=Isolation.TASK,  # The player's process already isolates the episodes.
        sessions_per_worker=options.max_sessions,
        step_timeout_s=2 * options.start_timeout_s + options.timeout_s + CLOSE_S,
        is_repeatable=False,
        start_score=rule.start_score,
        stop=shared.stop,
        stop_timeout_s=3 * CLOSE_S,
    )
