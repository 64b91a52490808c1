"""Text of observations of web sites."""


def tab_line(titles: list[str], current: int) -> str:
    """Return the line with the titles of the open tabs."""
    marks = [" (current)" if i == current else "" for i in range(len(titles))]
    return " | ".join(
        f"Tab {i}{mark}: {title}" for i, (mark, title) in enumerate(zip(marks, titles, strict=True))
    )


def agentgym(*, tabs: str, tree: str, url: str, goal: str, previous: str) -> str:
    """Return an observation in AgentGym's wording."""
    return (
        f"OBSERVATION:\n{tabs}\n\n{tree}\nURL: {url}\nOBJECTIVE: {goal}\n"
        f"PREVIOUS ACTION: {previous}"
    )


def compact(*, tabs: str, tree: str, url: str, goal: str, previous: str) -> str:
    """Return an observation for small models; `tabs` and `previous` may be ""."""
    lines = [f"goal: {goal}", f"url: {url}", tabs, tree, f"last: {previous}" if previous else ""]
    return "\n".join(line for line in lines if line)
