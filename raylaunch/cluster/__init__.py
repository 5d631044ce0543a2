"""The only room that knows Ray: connecting, looking around, reserving, the agents, and the driver."""
