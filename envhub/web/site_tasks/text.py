"""What the agent of the web sites is told."""

from envhub.web.actions import WEB_KINDS, instruction_lines

COMPACT_INSTRUCTION = (
    "You use web sites to reach the goal. The page is given as lines; [number] is the id of an "
    "element. Answer with one action. When you are done, or know the answer, use stop.\n"
    f"{instruction_lines(WEB_KINDS)}"
)
AGENTGYM_INSTRUCTION = (
    "You control a web browser and do what the objective asks for. At every step you are given "
    "the accessibility tree of what the window shows, with the id of each element in square "
    "brackets; the open tabs; the address of the page; the objective; and your previous action.\n"
    "Actions, with their parameters in square brackets:\n"
    f"{instruction_lines(WEB_KINDS)}\n"
    "The homepage, http://homepage.com, lists the sites that you can visit.\n"
    "Take one action at a time, and only one that is possible now. Think first, beginning with "
    '"Let\'s think step-by-step", and close with "In summary, the next action I will perform '
    'is" followed by the action between triple backticks, for example ```click [12]```. Use stop '
    "when you think that the objective is reached, and write nothing after it. If it cannot be "
    "reached, the answer is N/A."
)


def tab_line(titles: list[str], current: int) -> str:
    """Return the line that names the open tabs."""
    marks = [" (current)" if i == current else "" for i in range(len(titles))]
    return " | ".join(
        f"Tab {i}{mark}: {title}" for i, (mark, title) in enumerate(zip(marks, titles, strict=True))
    )


def agentgym(*, tabs: str, tree: str, url: str, goal: str, previous: str) -> str:
    """Return an observation as AgentGym words it."""
    return (
        f"OBSERVATION:\n{tabs}\n\n{tree}\nURL: {url}\nOBJECTIVE: {goal}\n"
        f"PREVIOUS ACTION: {previous}"
    )


def compact(*, tabs: str, tree: str, url: str, goal: str, previous: str) -> str:
    """Return an observation for small models; `tabs` and `previous` may be ""."""
    lines = [f"goal: {goal}", f"url: {url}", tabs, tree, f"last: {previous}" if previous else ""]
    return "\n".join(line for line in lines if line)
