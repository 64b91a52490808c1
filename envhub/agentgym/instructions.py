"""What an agent is told before its first observation, for each AgentGym server."""

from envhub.agentgym.dialects import Extraction
from envhub.env import Style

THOUGHT_AND_ACTION = """\
Answer in this form:
Thought:
<your thoughts>

Action:
<one action>"""
SQL_ANSWER = """\
Explain the problem and your solution, then give one SQL statement on one line, in this form:
Thought: <your thoughts>

Action: ```sql
<the statement>
```"""
FENCED_ANSWER = """\
Think step by step, then say "In summary, the next action I will perform is" and the one action \
inside triple backticks, as in ```click [12]```."""
TOOL_ANSWER = """\
Answer in this form, with the input as a dictionary on the same line:
Thought: <your thoughts>

Action: <name> with Action Input: <input>"""

ANSWERS = {
    Extraction.ONE_ACTION: THOUGHT_AND_ACTION,
    Extraction.LAST_ACTION: THOUGHT_AND_ACTION,
    Extraction.FIRST_ACTION: THOUGHT_AND_ACTION,
    Extraction.SQL_BLOCK: SQL_ANSWER,
    Extraction.FENCED: FENCED_ANSWER,
    Extraction.WHOLE: "",
}
COMPACT_ANSWERS = {
    Extraction.SQL_BLOCK: "Answer with one SQL statement on one line.",
    Extraction.FENCED: "Answer with one action inside triple backticks, as ```click [12]```.",
    Extraction.WHOLE: "",
}

_DATES = "dates as YYYY-MM-DD"
TASKS = {
    "textcraft": """\
You are given crafting commands for items of Minecraft and a goal to craft. The actions: \
"get 2 oak log" takes items that cannot be crafted, "inventory" shows what you hold, and \
"craft 4 oak planks using 1 oak log" crafts with one of the given commands. Always state \
quantities, and never where an item comes from. Use no commands but the given ones; where one \
names a kind of ingredient, such as planks, take one item of that kind, such as dark oak planks.""",
    "babyai": """\
You explore rooms to reach the goal that you are given. The actions: turn left; turn right; move \
forward; go to <object> <number>; pickup <object> <number>; go through <open door> <number>; \
toggle and go through <door> <number>, for a closed door, or a locked one whose key you carry; \
toggle, for a door right in front of you. Each observation lists the actions that can be done \
now; choose one of them.""",
    "sciworld": """\
You are an agent in a world of science and work on the task that you are given. The actions, \
with OBJ for an object and LOC for a place: open OBJ; close OBJ; activate OBJ; deactivate OBJ; \
connect OBJ to OBJ; disconnect OBJ; use OBJ; use OBJ on OBJ; look around; look at OBJ; look in \
OBJ; read OBJ; move OBJ to OBJ; pick up OBJ; put down OBJ; pour OBJ into OBJ; dunk OBJ into OBJ; \
mix OBJ; go to LOC; eat OBJ; flush OBJ; focus on OBJ; wait; wait1; examine OBJ; task; inventory.""",
    "alfworld": """\
You do a household task in a house of rooms and receptacles. The actions, with O for an object \
and R for a receptacle: go to R; take O from R; put O in/on R; open R; close R; toggle O; heat O \
with R; cool O with R; clean O with R; examine O; use O; look; inventory. Choose among the \
available actions. "Nothing happens" means that the action was not possible.""",
    "maze": """\
You walk through a maze to the goal in as few steps as possible. Each turn you are told where \
the goal is, where you are and which walls are beside you. Moving right adds 1 to the second \
number of the position, moving down adds 1 to the first. The actions: move up; move down; move \
left; move right.""",
    "wordle": """\
You guess a hidden word of five letters in at most six attempts. Write each guess as letters with \
spaces between them, such as "s h i r e", and choose words of the given vocabulary only. The \
answer has a letter for each of yours: "g" is right, "y" is in the word but elsewhere, "b" is not \
in the word.""",
    "webshop": """\
You shop on a website for what the instruction describes. The actions: search[keywords] where \
there is a search bar, and click[value] with the text of something on the page. An action that is \
not possible does nothing. Choose the product and its options, then click[Buy Now].""",
    "sqlgym": """\
You are given the description of an SQLite database and a question. Answer the question with SQL \
that is run on the database.""",
    "searchqa": """\
You answer a question with the help of a search engine. Reason inside <think> and </think> first. \
Where you lack knowledge, write <search>query</search> and stop: what is found comes between \
<information> and </information>. Write none of that yourself. When you know enough, write \
<answer>your answer</answer>.""",
    "weather": f"""\
You answer a question about the weather with tools: get_user_current_date, \
get_user_current_location, get_latitude_longitude (name), get_elevation (latitude, longitude), \
get_distance (latitude1, longitude1, latitude2, longitude2), get_air_quality_level \
(air_quality_index), check_valid_actions and finish (answer); get_current_temp, \
get_current_rain, get_current_snow and get_current_air_quality_index (latitude, longitude, \
current_date); get_historical_temp, get_historical_rain, get_historical_snow, \
get_historical_air_quality_index, get_temp_forecast, get_rain_forecast and get_snow_forecast \
(latitude, longitude, start_date, end_date), {_DATES}.""",
    "movie": """\
You answer a question about films with tools: get_search_movie (movie_name); get_movie_details, \
get_movie_production_companies, get_movie_production_countries, get_movie_cast, get_movie_crew, \
get_movie_keywords, get_movie_alternative_titles and get_movie_translation (movie_id); \
get_search_person (person_name); get_person_details, get_person_cast, get_person_crew and \
get_person_external_ids (person_id); check_valid_actions; finish (answer).""",
    "academia": """\
You answer a question about a network of papers and authors with tools: loadPaperNet; \
loadAuthorNet; neighbourCheck (graph, node), where the graph is PaperNet or AuthorNet; \
paperNodeCheck (node); authorNodeCheck (node); authorEdgeCheck (node1, node2); finish (answer). \
Load a network before you ask about it.""",
    "todo": f"""\
You manage a to-do list with tools: get_user_current_date; get_user_current_location; \
get_projects; update_project (project_id, is_favorite); get_tasks (project_id); \
get_task_description and get_task_duration (task_id); complete_task (task_id); update_task \
(task_id, due_date); delete_task (task_id); check_valid_actions; finish (answer), {_DATES}.""",
    "sheet": """\
You edit spreadsheets with tools: open_sheet (name); del_sheet (name); freeze_data (dimension, \
num); get_A1_annotation (row, col); insert_cols (values_list, col_idx); insert_rows (values_list, \
row_idx); delete_batch_data (dimension, index_list); update_cell (position, value); \
update_cell_by_formula; update_range (start_position, end_position, values_list); \
sort_sheet_by_col (col_num, order); merge_cells; update_note (position, content); \
get_all_values; get_range_values; get_cell_value; get_value_by_formula; filter_cells (query, \
in_row, in_column); get_note (position); finish. Open a sheet before you work on it, and finish \
when it is as asked.""",
    "webarena": """\
You reach an objective in a web browser. Each turn you are shown the accessibility tree of the \
current page, its URL, the open tabs, the objective and your previous action. The actions: \
click [id]; hover [id]; type [id] [text] [1], where a last [0] leaves out the Enter key; press \
[keys]; scroll [up] or scroll [down]; new_tab; tab_focus [number]; close_tab; goto [url]; go_back; \
go_forward; stop [answer]. Put each parameter in square brackets. http://homepage.com lists the \
sites. Stop when the objective is reached, with the answer if one is asked for, or N/A if it \
cannot be reached.""",
}
TOOLS = frozenset({"weather", "movie", "academia", "todo", "sheet"})


def instruction(name: str, extraction: Extraction, style: Style) -> str:
    """Return what the agent is told about a server's environment and the form of its answer."""
    if name in TOOLS:
        answer = TOOL_ANSWER
    elif style is Style.COMPACT:
        answer = COMPACT_ANSWERS.get(extraction, "Answer with one action.")
    else:
        answer = ANSWERS[extraction]
    return f"{TASKS[name]}\n{answer}".rstrip()
