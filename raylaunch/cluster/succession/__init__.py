"""The part of the agents in takeovers: how they serve one driver of a detached run after another.

`agent_session` records, in an agent, which driver is in command (the one with the highest epoch, a fencing token), the
newest goal that the agent was shown, and the driver's ledger. `interim_keeper` is an actor that has the ledger while no
agent has it. `named_resources` names what a run has in the
cluster. `folder_fence` keeps a driver that was replaced from writing into the run folder.
"""
