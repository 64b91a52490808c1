"""The targets of a BabyAI instruction: cells and actions that complete or advance it now."""

from dataclasses import dataclass

from minigrid.envs.babyai.core.verifier import (
    AfterInstr,
    AndInstr,
    BeforeInstr,
    GoToInstr,
    Instr,
    OpenInstr,
    PickupInstr,
    PutNextInstr,
    SeqInstr,
)

from envhub.envs.babyai import scene as sc
from envhub.envs.babyai.actions import ActionEffect
from envhub.envs.babyai.scene import GridScene

OPENING = (ActionEffect.TOGGLE, ActionEffect.TOGGLE_THROUGH)
CLOSING = (ActionEffect.TOGGLE,)
PICKING_UP = (ActionEffect.PICKUP,)
DROPPING = (ActionEffect.DROP,)


@dataclass(frozen=True, slots=True)
class FacingTarget:
    """Cells to face, and the kinds of action that finish there; no kinds: facing is enough.

    `then` is the destination of an object that is picked up here; None if it does not matter.
    """

    positions: frozenset[int]
    kinds: tuple[ActionEffect, ...]
    then: "FacingTarget | None" = None


def position_of(cell, stride: int) -> int:
    """Return the padded position of a minigrid (x, y)."""
    return (int(cell[1]) + sc.PAD) * stride + int(cell[0]) + sc.PAD


def current_targets(level, scene: GridScene) -> list[FacingTarget]:
    """Return the next targets of the level's instruction; usually one."""
    targets = [_target(level, scene, clause) for clause in _open_clauses(level.instrs)]
    return [target for target in targets if target is not None and target.positions]


def _open_clauses(instruction: Instr) -> list[Instr]:
    """Return the active clauses of an instruction with before, after and and."""
    if isinstance(instruction, BeforeInstr):
        is_first = instruction.a_done != "success"
        return _open_clauses(instruction.instr_a if is_first else instruction.instr_b)
    if isinstance(instruction, AfterInstr):
        is_first = instruction.b_done != "success"
        return _open_clauses(instruction.instr_b if is_first else instruction.instr_a)
    if isinstance(instruction, AndInstr):
        clauses = []
        if instruction.a_done != "success":
            clauses += _open_clauses(instruction.instr_a)
        if instruction.b_done != "success":
            clauses += _open_clauses(instruction.instr_b)
        return clauses
    return [instruction]


def _target(level, scene: GridScene, clause: Instr) -> FacingTarget | None:
    """Return the target of one clause of an instruction; None: it is complete."""
    if isinstance(clause, GoToInstr):
        return FacingTarget(
            frozenset(position_of(p, scene.stride) for p in clause.desc.obj_poss), ()
        )
    if isinstance(clause, OpenInstr):
        closed = [door for door in clause.desc.obj_set if not door.is_open]
        if closed or not scene.closes_doors:
            return FacingTarget(_where(level, scene, closed), OPENING)
        return FacingTarget(_where(level, scene, clause.desc.obj_set), CLOSING)
    if isinstance(clause, PickupInstr):
        return FacingTarget(_where(level, scene, clause.desc.obj_set), PICKING_UP)
    if isinstance(clause, PutNextInstr):
        return _put_next(level, scene, clause)
    return None


def _where(level, scene: GridScene, wanted: list) -> frozenset[int]:
    """Return the positions of these exact objects; minigrid does not always store them."""
    identities = {id(thing) for thing in wanted}
    width = level.grid.width
    cells = (i for i, thing in enumerate(level.grid.grid) if id(thing) in identities)
    return frozenset(position_of((i % width, i // width), scene.stride) for i in cells)


def _put_next(level, scene: GridScene, clause: PutNextInstr) -> FacingTarget:
    """Return the cells to drop the moved object on, or the object to pick up first."""
    moved = _where(level, scene, clause.desc_move.obj_set)
    near = {
        position_of(cell, scene.stride) + sc.delta(scene.stride, heading)
        for cell in clause.desc_fixed.obj_poss
        for heading in range(4)
    }
    beside = FacingTarget(
        frozenset(p for p in near if scene.codes[p] == sc.FREE or p in moved), DROPPING
    )
    if not beside.positions:
        taken = frozenset(p for p in near if scene.codes[p] == sc.THING)
        return FacingTarget(taken, PICKING_UP)
    if any(level.carrying is thing for thing in clause.desc_move.obj_set):
        return beside
    return FacingTarget(moved, PICKING_UP, then=beside)


def closes_doors(level) -> bool:
    """Return whether an open door may have to be closed and opened again.

    This is so if opening a door is one of several parts: the way to another part may open it too
    early.
    """
    return isinstance(level.instrs, SeqInstr) and _has_opening(level.instrs)


def _has_opening(instruction: Instr) -> bool:
    """Return whether an instruction contains a door to open."""
    if isinstance(instruction, SeqInstr):
        return _has_opening(instruction.instr_a) or _has_opening(instruction.instr_b)
    return isinstance(instruction, OpenInstr)
