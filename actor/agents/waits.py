"""Names of the parts outside of a run's roles that an actor may wait for."""

AGENTS = "agents"  # The programs of `actor.agent`.
