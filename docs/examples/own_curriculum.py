"""A horizon, a curriculum of items and a filter of groups of your own."""


def until_solved(progress, cfg):
    """One more turn whenever half of the episodes of the last five steps were solved."""
    recent = [step for step in progress.steps if step.version > progress.state.get("since", 0)][-5:]
    num_episodes = sum(step.num_episodes for step in recent)
    num_solved = sum(step.num_solved for step in recent)
    if len(recent) < 5 or num_solved < num_episodes / 2:
        return max(progress.horizon, progress.stages[0])
    progress.state["since"] = progress.version
    return min(progress.horizon + 1, progress.stages[-1])


def near_half(draw, cfg):
    """Of eight random items, the one whose recent success is nearest to one half."""
    task = draw.random.choices(draw.tasks, [task.weight for task in draw.tasks])[0]
    items = [draw.random.randrange(task.num_items) for _ in range(8)]

    def distance(index):
        success = draw.success(task.name, index)
        return 0.0 if success is None else abs(success - 0.5)

    return task.name, min(items, key=distance)


def has_winner(members, cfg):
    """Train only groups in which a member solved the task."""
    return any(member.is_success for member in members)
