"""Who trains together, and why: pure decisions on events, without clocks, threads or I/O.

    messages                events that the controller reports, commands that it carries out
    coordinator             takes an event, returns commands
    generation              the members at present, and how their generation begins and ends
    planning/, workers/     who is to be a member next; how each worker stands, which are silent or
                            keep the others waiting
    takeover                a controller that begins while workers train

`docs/architecture.md` tells one failure and one join as a whole.
"""
