"""The phases of a run, and the table of transitions between them.

    gathering    no generation; waits for enough workers, and until it is safe to continue
    claiming     waits until the number of the next generation is claimed, so that no other
                 controller has it; usually it is by now, since it is claimed while ending
    forming      a membership was announced; its members connect, and members without state
                 receive it
    running      all members are past forming
    ending       the generation was told to end, at a step (planned) or now (abort); waits for
                 every member
    taking over  a coordinator that replaces another asks every worker for its state
    over         finished, failed, or another controller leads

    gathering -> claiming -> gathering -> forming -> running -> ending -> gathering -> ...

The phase changes only in this file. A transition that the table does not list is a bug of the
coordinator.
"""

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The phases, described above."""

    GATHERING = "gathering"
    CLAIMING = "claiming"
    FORMING = "forming"
    RUNNING = "running"
    ENDING = "ending"
    TAKING_OVER = "taking over"
    OVER = "over"


class Transition(StrEnum):
    """What may change the phase."""

    CLAIM_SENT = "claim sent"
    CLAIM_GRANTED = "claim granted"
    ANNOUNCED = "generation announced"
    ALL_FORMED = "all members formed"
    END_REQUESTED = "end of the generation requested"
    ALL_OUT = "all members out"
    TAKEOVER_BEGAN = "takeover began"
    TAKEOVER_ENDED = "takeover ended"
    RUN_ENDED = "run ended"


IN_FLIGHT = frozenset({Phase.FORMING, Phase.RUNNING, Phase.ENDING})

TABLE: dict[tuple[Phase, Transition], Phase] = {
    (Phase.GATHERING, Transition.TAKEOVER_BEGAN): Phase.TAKING_OVER,
    (Phase.TAKING_OVER, Transition.TAKEOVER_ENDED): Phase.ENDING,
    (Phase.GATHERING, Transition.CLAIM_SENT): Phase.CLAIMING,
    (Phase.CLAIMING, Transition.CLAIM_GRANTED): Phase.GATHERING,
    (Phase.GATHERING, Transition.ANNOUNCED): Phase.FORMING,
    (Phase.FORMING, Transition.ALL_FORMED): Phase.RUNNING,
    **{(phase, Transition.END_REQUESTED): Phase.ENDING for phase in IN_FLIGHT},
    **{(phase, Transition.ALL_OUT): Phase.GATHERING for phase in IN_FLIGHT},
    **{(phase, Transition.RUN_ENDED): Phase.OVER for phase in Phase if phase is not Phase.OVER},
}


class IllegalTransition(Exception):
    """A bug of the coordinator: the transition does not exist in this phase."""

    def __init__(self, phase: Phase, transition: Transition) -> None:
        super().__init__(f"{transition} while {phase}")
        self.phase, self.transition = phase, transition


@dataclass
class PhaseMachine:
    """Holds the phase and changes it by the table."""

    phase: Phase = Phase.GATHERING

    def apply(self, transition: Transition) -> None:
        """Change the phase. Raises IllegalTransition if the table does not list the transition."""
        if (self.phase, transition) not in TABLE:
            raise IllegalTransition(self.phase, transition)
        self.phase = TABLE[self.phase, transition]
