"""Check whether a layout is solvable: some lock the only key behind its own door."""

from minigrid.core.world_object import Door, Key
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.envs.babyai.core.verifier import Instr, ObjDesc, OpenInstr, PutNextInstr, SeqInstr

Cell = tuple[int, int]


def has_way(level: RoomGridLevel) -> bool:
    """Return whether the mission's objects are reachable with the reachable keys.

    The check is exact for locked doors. It assumes that obstacles can be moved aside and that rooms
    without a locked door are connected, as in minigrid.
    """
    doors = [thing for thing in level.grid.grid if isinstance(thing, Door)]
    if not any(door.is_locked for door in doors):
        return True
    faced, entered = _reach(level)
    return _can_be_met(level, level.instrs, faced, entered)  # type: ignore[attr-defined]


def _reach(level: RoomGridLevel) -> tuple[set[Cell], set[Cell]]:
    """Return the cells that the agent can face, and those that it can enter or clear."""
    # Colours of found keys. `level.carrying` still belongs to the last episode.
    colors: set[str] = set()
    shut: dict[str, list[Cell]] = {}  # Locked doors without a found key, by colour.
    faced: set[Cell] = set()
    entered: set[Cell] = set()
    x, y = level.agent_pos
    stack = [(int(x), int(y))]
    while stack:
        cell = stack.pop()
        thing = level.grid.get(*cell)
        if cell in entered or (thing is not None and thing.type in ("wall", "lava")):
            continue
        faced.add(cell)
        if isinstance(thing, Door) and thing.is_locked and thing.color not in colors:
            shut.setdefault(thing.color, []).append(cell)
            continue
        entered.add(cell)
        for found in (thing, getattr(thing, "contains", None)):
            if isinstance(found, Key) and found.color not in colors:
                colors.add(found.color)
                stack += shut.pop(found.color, [])
        x, y = cell
        stack += [(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)]
    return faced, entered


def _can_be_met(
    level: RoomGridLevel, instruction: Instr, faced: set[Cell], entered: set[Cell]
) -> bool:
    """Return whether all objects of an instruction are reachable."""
    if isinstance(instruction, SeqInstr):
        parts = (instruction.instr_a, instruction.instr_b)
        return all(_can_be_met(level, part, faced, entered) for part in parts)
    if isinstance(instruction, PutNextInstr):
        both = (instruction.desc_move, instruction.desc_fixed)
        return all(_is_any_in(level, each, faced) for each in both)
    wanted: ObjDesc = instruction.desc  # type: ignore[attr-defined]
    return _is_any_in(level, wanted, entered if isinstance(instruction, OpenInstr) else faced)


def _is_any_in(level: RoomGridLevel, wanted: ObjDesc, cells: set[Cell]) -> bool:
    """Return whether one of the described objects is in these cells."""
    _, positions = wanted.find_matching_objs(level)
    return any(position in cells for position in positions)
