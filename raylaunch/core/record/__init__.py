"""The record of a run: its journal, and the result that is computed from the journal alone.

Read `journal` first: `events.jsonl` holds each event with the actions that followed, and replaying the events gives
the same actions. `result` turns the entries into `RunResult` (`result.json`), with an `attempt` for each.
`run_layout` names the files of a run folder.
"""
