"""TextCraft's catalogue entry, with the recipes and tasks of the options."""

from dataclasses import replace
from functools import partial

from common.config.envs import EnvsSection
from envhub.env import EnvSpec
from envhub.envs.textcraft.episode import TextCraftEnv
from envhub.envs.textcraft.exchange import ExchangedEnv
from envhub.envs.textcraft.minecraft import RecipesError
from envhub.envs.textcraft.tasks import folder_catalogue, our_catalogue
from envhub.tasks import spec_beside


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return TextCraft's catalogue entry.

    Raises: RecipesError: the folder of recipe files is unusable.
    """
    folder = options.textcraft.recipes_dir
    catalogue = folder_catalogue(folder) if folder else our_catalogue()
    if options.textcraft.max_distractors >= 0:
        catalogue = replace(catalogue, max_distractors=options.textcraft.max_distractors)
    make = partial(TextCraftEnv, catalogue=catalogue)
    if options.textcraft.exchanged_frac:
        make = partial(ExchangedEnv, catalogue=catalogue, frac=options.textcraft.exchanged_frac)
    spec = spec_beside(__file__, catalogue.subsets, make, from_agentgym=catalogue.from_agentgym)
    return replace(spec, tasks=catalogue.tasks()) if folder else spec


def check(options: EnvsSection) -> list[str]:
    """Return a line about the problem of the recipe folder, if one is given."""
    if not options.textcraft.recipes_dir:
        return []
    try:
        folder_catalogue(options.textcraft.recipes_dir)
    except RecipesError as error:
        return [f"envs.textcraft.recipes_dir: {error}; use a folder of Minecraft recipe files"]
    return []
