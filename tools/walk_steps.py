"""The steps of each walk that `tools.walks` counts: what an event, an order or the job reaches, in this order.

A line that begins with `#` begins a part of a process which a message, a signal, a thread or a new process reaches, so its
first step needs no call. All further steps of the part are reached by calls. What is said of a step is said of its
module, which is named where the walk reaches it first.
"""

from __future__ import annotations

_START_OF_AGENT = """
# The agent of each node
cluster.agent.ray_actor:AgentActor.begin | the agent's process
cluster.agent.serialization:load_spec
cluster.agent.agent:Agent | the agent; what is new on its node becomes a status
core.placement.environment:base_env | the environment that the workers of the node share; later the ranks, and RANK of each worker
node.supervisor.supervisor:Supervisor.start | starts the fork server; later carries out orders
node.supervisor.forkserver_client:ForkServerClient.start | starts the subreaper, and owns the connection to the fork server
node.protocol.forkserver_messages:Initialize | between supervisor and fork server
node.protocol.wire:send | as bytes
# Subreaper and fork server
node.forkserver.subreaper:main | forks the fork server
node.forkserver.server:main | imports ahead, then serves
node.preload.initial:import_ahead | imports torch
node.protocol.node_status:Ready
# The agent's event loop
cluster.agent.agent:Agent._agent_ready
node.protocol.node_status:AgentReady | what is true of the node
# The agent, for the driver's pending call
cluster.agent.ray_actor:AgentActor.next_report
node.protocol.node_status:StatusFeed.news
cluster.agent.serialization:dump_report
"""
_ORDER = """
cluster.fleet.ray_fleet:RayAgents.send | sends them with a call of the agent
node.protocol.node_goal:NodeGoals.add | all orders to a node that still matter
cluster.agent.serialization:dump_goal
# The agent of each node
cluster.agent.ray_actor:AgentActor.obey
cluster.agent.serialization:load_goal
cluster.agent.agent:Agent.handle
node.supervisor.supervisor:Supervisor.handle
"""
_LAUNCH = (
    """
# The driver's loop, for the actions
cluster.driver.executor:Executor.perform | actions become orders
core.placement.environment:assign | the ranks, and the environment that tells them
node.protocol.node_goal:LaunchWorkers | all orders to a node that still matter
"""
    + _ORDER
    + """
node.protocol.node_spec:NodeSpec.workers | what all workers of a node have in common, and each one's specification
worker.runtime.spec:WorkerSpec | what a worker is started with
core.placement.environment:worker_env
node.protocol.forkserver_messages:StartWorkers
# The fork server
node.forkserver.server:ForkServer.serve
node.forkserver.server:WorkerTable.fork | the workers of an attempt
node.linux.processes:fork | forks them
worker.runtime.boot:set_up_and_run | in each new process: environment, signals, output files
worker.runtime.process_setup:die_with_parent | ends it with the fork server
worker.runtime.entry:run | runs the script
"""
)

WALKS = {
    "A job file becomes RANK in a worker's environment": (
        "`raylaunch conf/job.yaml` on a Ray cluster, until the script's process has RANK.",
        """
# The command
cli.main:main | parses the command line, loads the job, starts the run
cli.args.parser:parse | splits the command line into flags, job file and `key=value`
cli.args.flags:Flag | the table of flags
cli.config.load:load | merges environment, job file and command line into one `Job`
cli.config.load:_line_settings
cli.config.job_file:read_job_file | reads and parses the job file; checks that the script exists
cli.config.schema:to_job | the types of all settings
core.job.validation:problems | checks values that have the right type
core.job.job:Job | what a person asks for
cli.run_once:run | turns errors into messages and exit codes; runs the job with the console as its observer
cluster.run:run_job | decides between a cluster and this machine, connects, plans, starts the driver
# The command, where it needs Ray
cluster.session.ray_session:find | connects to Ray; lists its nodes with their resources
cluster.session.discovery:choose | finds the cluster that this machine belongs to
cluster.session.ray_session:_probe_as_auto
# The run begins
cluster.run:_prepare
cluster.run:plan_in
cluster.session.ray_session:RaySession.nodes
core.placement.plan:make_plan | decides how many workers run on which node
core.job.node_rules:nproc | what differs on single nodes
cluster.run:_agent_spec
node.protocol.node_spec:AgentSpec | what an agent is told: the job, and what the driver knows besides; later each worker's specification
cluster.driver.driver:Driver.run | the event loop
# The fleet's thread
cluster.fleet.ray_fleet:RayFleet._reserve | makes requests of Ray
cluster.fleet.allocator:FleetBase._decide | decides which slots to reserve, and where to start agents
# The allocator
cluster.fleet.allocator:Allocator.start
cluster.fleet.allocator:ReserveGang
# The fleet's thread, for a request
cluster.fleet.ray_fleet:RayFleet._do
cluster.ray_api.placement_groups:PlacementGroups.reserve_gang | the reservation
cluster.agent.serialization:dump_spec | messages between driver and agents as bytes
"""
        + _START_OF_AGENT
        + """
# The driver's loop
cluster.fleet.ray_fleet:RayAgents._listen
cluster.agent.serialization:load_report
# The driver's loop, for the report
cluster.driver.driver:Driver._came_up
core.machine.events_and_actions:NodeJoined | events and actions
# The state machine
core.machine.machine:Machine.handle | decides
core.machine.nodes:node_joined | what follows when a node has joined
core.machine.transitions:gather | there are enough nodes
core.machine.run_state:Membership.choose | which of them take part
core.machine.events_and_actions:Launch
"""
        + _LAUNCH,
    ),
    "`kill -9` of a worker, until workers run again": (
        "All workers run, and one of them is killed.",
        """
# The fork server
node.forkserver.server:ForkServer.serve | SIGCHLD wakes it
node.forkserver.server:WorkerTable.reap | `waitpid` says which worker died, and how
core.machine.workers_status:WorkerExit | how a worker ended; later what is true of the workers of its node
node.protocol.wire:send | as bytes
# The agent
cluster.agent.agent:Agent._poll_supervisor | its event loop wakes up
node.supervisor.supervisor:Supervisor.poll | reads the message
node.supervisor.forkserver_client:ForkServerClient.receive | from this connection
node.supervisor.process_failure:failure | collects the worker's exception, the end of its stderr, and further evidence
node.supervisor.process_failure:OomKills | whether the kernel killed it because memory ran out
core.machine.workers_status:WorkersStatus | what is true of its workers
# The agent, for the driver's pending call
cluster.agent.ray_actor:AgentActor.next_report | answers it
cluster.agent.agent:Outbox.take | output of the worker first, then its end
node.protocol.node_status:StatusFeed.news | what is true of the node
cluster.agent.serialization:dump_report | messages between driver and agents as bytes
# The fleet
cluster.fleet.ray_fleet:RayAgents._listen | receives the answer, and calls again
cluster.agent.serialization:load_report
# The driver's loop
cluster.driver.driver:Driver.run | takes it from its inbox
core.machine.observe:observe | what is new in the node's status, as events
core.machine.events_and_actions:WorkersExited | events and actions
core.machine.machine:Machine.handle | decides
core.machine.workers:workers_changed | what follows from what workers do
core.failures.failure:root_cause | which failure is the root cause, and whether a restart can help
# The state machine
core.machine.workers:workers_changed
core.machine.restart_policy:RestartBudget | whether a restart is left
core.machine.transitions:restart_world | from RUNNING to STARTING
core.machine.transitions:launch_world | the next attempt
core.machine.run_state:Membership.choose | which nodes take part in it
core.machine.events_and_actions:Launch
"""
        + _LAUNCH,
    ),
    "A node joins, until the bigger world runs": (
        "A job with `nnodes: MIN:MAX` runs on fewer than MAX nodes. A placement group for another node is pending in Ray.",
        """
# The fleet's thread
cluster.ray_api.placement_groups:PlacementGroups.when_granted | Ray grants the reservation
# The fleet
cluster.fleet.ray_fleet:RayFleet._granted | is told
# The allocator
cluster.fleet.allocator:Allocator.granted | the slot has a host now
cluster.fleet.allocator:SlotTable.get
# The fleet's thread, for a request
cluster.fleet.ray_fleet:RayFleet._do
cluster.agent.serialization:dump_spec | messages between driver and agents as bytes
"""
        + _START_OF_AGENT
        + """
# The driver's loop
cluster.fleet.ray_fleet:RayAgents._listen
cluster.agent.serialization:load_report
# The driver's loop, for the report
cluster.driver.driver:Driver._came_up | the event loop
core.machine.events_and_actions:NodeJoined | events and actions
# The state machine
core.machine.machine:Machine.handle | decides
core.machine.nodes:node_joined | a bigger world is possible; waits for `last_call`
core.machine.nodes:plan_resize
core.machine.run_state:Membership.successors | which nodes would take part
# The state machine, when the time has come
core.machine.machine:Machine.handle
core.machine.machine:_tick | what is due
core.machine.saving:save_world | from RUNNING to SAVING
core.machine.events_and_actions:RequestCheckpoint
# The driver's loop, for the actions
cluster.driver.executor:Executor.perform | for the checkpoint it proposes a step, and fixes it when no rank is past it
node.protocol.node_goal:ProposeCheckpoint
"""
        + _ORDER
        + """
node.supervisor.supervisor:PagePoller.handle_checkpoint | writes the step to the shared page, and reads the answers
# What the agent and its workers share
worker.heartbeats.shared_page:SharedPage | the shared page
# The script of each worker
worker:should_checkpoint | the API of scripts
worker.heartbeats.heartbeat_writer:current_writer | whether this process is the worker
worker.heartbeats.heartbeat_writer:HeartbeatWriter | whether this step is the one; then waits to be ended
# The agent
cluster.agent.agent:Agent._poll_supervisor
core.machine.workers_status:WorkersStatus | what is true of its workers
# The agent, for the driver's pending call
cluster.agent.ray_actor:AgentActor.next_report
cluster.agent.serialization:dump_report
# The driver's loop, for the report
cluster.driver.driver:Driver.run
core.machine.observe:observe | what is new in the node's status, as events
core.machine.events_and_actions:WorkersCheckpointed
core.machine.machine:Machine.handle
core.machine.workers:workers_changed | what follows from what workers do
core.machine.saving:stop_if_all_saved
core.machine.transitions:replace_world | from SAVING to STOPPING, to STARTING
core.machine.transitions:launch_world | the next attempt
core.machine.events_and_actions:Launch
"""
        + _LAUNCH,
    ),
    "`state.commit`, until it is restored after a host was lost": (
        "A script that uses `State`, on several hosts, one of which is switched off.",
        """
# The script of each worker
worker.state.elastic_state:State.commit | what a script calls
worker.state.elastic_state:CommitSchedule.is_due | whether a commit is due
worker.state.snapshots.snapshot:Snapshot | what is committed, by tensors
worker.state.rank_commits:RankCommits.write | the commits of a rank
worker.state.shared_tensors:find | which tensors are equal on all ranks
worker.state.commit_agreement:CommitAgreement | what the ranks agree on in their TCPStore
worker.heartbeats.heartbeat_writer:HeartbeatWriter.record_committed | shows the commit on the shared page
# The same, for its buffer
worker.state.rank_buffers:RankBuffers.write | into which buffer
worker.state.commit_buffer:CommitBuffer | what a buffer has
# The same, where it has none
worker.state.rank_commits:RankCommits.begin
worker.state.buffer_client:ask | gets buffers from the agent
# The agent
cluster.agent.agent:Agent._poll_supervisor | its event loop wakes up
node.supervisor.supervisor:Supervisor.poll | also for what workers ask for
# The agent, for a buffer
node.state.state_memory:StateMemory.poll | answers
node.state.state_files:StateFiles.reserve | all memory files of the node
node.state.state_files:MemoryFile.create | one of them
# A thread of the agent
capabilities.state.commit_copies:CommitPushes._push_all | copies commits to the next host
capabilities.state.commit_copies:push
node.state.transfer:send_part | as bytes
# The agent of that host
node.state.part_server:PartServer._take_part | serves other agents
node.state.transfer:receive_part
# The driver's loop
cluster.driver.driver:Driver._node_lost | a host is gone
core.machine.events_and_actions:NodeLost | events and actions
# The state machine
core.machine.machine:Machine.handle | decides
core.machine.nodes:node_lost | what follows when a node is lost
core.machine.transitions:restart_world | from RUNNING to STARTING
core.machine.transitions:launch_world | the next attempt
core.machine.run_state:Membership.choose | which nodes take part in it
core.machine.events_and_actions:Launch
"""
        + _LAUNCH
        + """
# The script of the first worker of each node
worker.state.elastic_state:State.restore
worker.state.rank_commits:RankCommits.begin
worker.state.commit_agreement:CommitAgreement.choose_commit | how the ranks choose what they restore
worker.state.buffer_client:ask
# The agent of each node
node.supervisor.supervisor:Supervisor.poll
node.state.state_memory:StateMemory._answer
# The same agent, which says what the node holds
capabilities.state.agent:StateCopies._restore
# The same worker
worker.state.commit_agreement:CommitAgreement.choose_commit
worker.state.commit_agreement:CommitAgreement.exchange
worker.state.commit_agreement:orders
core.machine.commits:choose | which commit the world goes on from
# The same worker, when it has the answer
worker.state.buffer_client:ask
# The agent of each node, for the order
node.state.state_memory:StateMemory._answer
# The same agent, which gets what the node lacks
capabilities.state.agent:StateCopies._restore
# A thread of the agent, for the order
capabilities.state.commit_copies:fetch
node.state.transfer:receive_part
# The agent, when it has all parts
node.state.state_memory:StateMemory.announce | writes the choice to the shared page
# What the agent and its workers share
worker.heartbeats.shared_page:SharedPage | the shared page
# The script of each worker
worker.state.elastic_state:State.restore
worker.state.rank_commits:RankCommits.begin
worker.heartbeats.heartbeat_writer:NodeCommits.commit_to_restore
worker.state.rank_commits:RankRestore.read
worker.state.snapshots.restored:Restored | the objects of the script again
# The same, for its parts
worker.state.buffer_client:ask
""",
    ),
    "The driver of a detached run is killed, until another one is in command": (
        "A run that was started with `-d` on a cluster. Its workers run on meanwhile.",
        """
# Each agent
cluster.agent.link:Link | sees that the driver's process is gone
# Ray starts the driver's process again
cluster.detached.driver_actor:DriverActor | the process of a driver
cluster.driver.succession:find | asks who keeps what the last driver has written down
cluster.driver.interim_keeper:look | where no agent is up yet
cluster.named_resources:announce | the names of what belongs to the run, and the epoch of the driver that takes over
# Each agent
cluster.agent.ray_actor:AgentActor.look | answers
# Each agent, for its answer
cluster.agent.agent:Agent | the agent
cluster.agent.agent_session:AgentSession | what an agent keeps of its drivers, and which one it obeys
# The driver
cli.detached.background_run:drive | runs the job as a command would
cli.run_once:run | turns errors into messages and exit codes
cluster.run:run_job | goes on with a run instead of beginning one
cluster.run:_resume
cluster.session.session_base:Session.links | the place of the run
cluster.driver.succession:Succession.fleet | the place of the driver among the drivers of the run
cluster.fleet.ray_fleet:RayFleet | the agents of the run
cluster.fleet.allocator:Allocator | which slot each of them is in
cluster.driver.run_folder:RunFolder | the files of the run
cluster.driver.folder_fence:FolderFence | what another driver writes there from now on is read by nobody
cluster.driver.driver:Driver.run | the event loop
# Each agent, which the fleet tells the epoch
cluster.agent.ray_actor:AgentActor.adopt
# The agent
cluster.agent.agent:Agent.adopted
cluster.agent.link:Link
# Each agent, for the driver's pending call
cluster.agent.ray_actor:AgentActor.next_report
node.protocol.node_status:StatusFeed.news | what is true of the node
cluster.agent.serialization:dump_report | messages between driver and agents as bytes
# The driver's loop
cluster.driver.driver:Driver._take_over
core.machine.observe:observe | what is new in the node's status, as events
core.machine.events_and_actions:DriverReplaced | the event of a takeover
# The state machine
core.machine.machine:Machine.handle | decides
""",
    ),
}
"""By their title: where each begins, and its steps."""
